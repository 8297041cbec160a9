"""The Triton backend: the row functions of `fastrl.backends.contract` as kernel launches; imported on first use."""

from __future__ import annotations

from torch import Tensor

from fastrl.backends.contract import ByToken, LossTerms, Statistics, Support, Transform
from fastrl.backends.triton.formulas import device_objective
from fastrl.kernels import row_forward_gradient as forward_gradient_kernel
from fastrl.kernels import row_gradient as gradient_kernel
from fastrl.kernels import row_statistics as statistics_kernel
from fastrl.kernels import support_hidden as support_hidden_kernel
from fastrl.kernels import support_products as support_products_kernel
from fastrl.kernels import support_statistics as support_statistics_kernels
from fastrl.kernels import support_weight as support_weight_kernel
from fastrl.kernels.find_support import find_support
from fastrl.kernels.scale import scale_
from fastrl.kernels.support_restrict import support_restrict
from fastrl.objectives.rows import RowInputs, RowObjective

__all__ = [
    "advise",
    "find_support",
    "row_forward_gradient",
    "row_gradient",
    "row_statistics",
    "scale_",
    "support_gradient",
    "support_hidden",
    "support_products",
    "support_restrict",
    "support_statistics",
    "support_weight",
]


def advise(tensor: Tensor) -> None:
    """Do nothing; the C++ backend uses it."""


def row_statistics(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> Statistics:
    """See `fastrl.backends.contract`."""
    return Statistics(*statistics_kernel.row_statistics(logits, targets, mask, *transform))


def row_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    out: Tensor,
) -> None:
    """See `fastrl.backends.contract`; `out` may be `logits`."""
    gradient_kernel.row_gradient(logits, targets, mask, *transform, statistics, c, h, out)


def row_forward_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor | None = None,
) -> LossTerms:
    """See `fastrl.backends.contract`."""
    function, numbers = device_objective(objective)
    weights = inputs.advantages, inputs.policy_weights
    result = forward_gradient_kernel.row_forward_gradient(
        logits, out, targets, mask, *transform, function, numbers, *weights, *inputs[2:]
    )
    return LossTerms(result[0], result[1], result[2:])


def _check_unit_strides(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 over its last dimension, got strides {x.stride()}")


def support_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, support: Support) -> Tensor:
    """See `fastrl.backends.contract`."""
    _check_unit_strides(hidden=hidden, weight=weight, bias=bias)
    return support_products_kernel.support_products(hidden, weight, bias, *support)


def support_statistics(values: Tensor, targets: Tensor, support: Support, transform: Transform) -> Statistics:
    """See `fastrl.backends.contract`."""
    arguments = (values, targets, support.token_ids, support.offsets, support.valid)
    return Statistics(*support_statistics_kernels.support_statistics(*arguments, *transform))


def support_gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    out: Tensor,
) -> None:
    """See `fastrl.backends.contract`; `out` may be `values`."""
    arguments = (values, targets, support.token_ids, support.offsets, support.valid)
    support_statistics_kernels.support_gradient(*arguments, *transform, statistics, c, h, out)


def support_hidden(gradient: Tensor, weight: Tensor, support: Support, out: Tensor) -> None:
    """See `fastrl.backends.contract`."""
    _check_unit_strides(weight=weight, out=out)
    support_hidden_kernel.support_hidden(gradient, weight, *support, out)


def support_weight(
    gradient: Tensor, hidden: Tensor, by_token: ByToken, out: Tensor | None, out_bias: Tensor | None, add: bool
) -> None:
    """See `fastrl.backends.contract`."""
    _check_unit_strides(hidden=hidden, out=out, out_bias=out_bias)
    ids, entries, rows = by_token
    support_weight_kernel.support_weight(gradient, hidden, ids, entries, rows, out, out_bias, add)
