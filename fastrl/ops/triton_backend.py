"""The Triton backend: the row functions of `fastrl.ops.contract`, launches only. Imported when it is first used."""

from __future__ import annotations

from torch import Tensor

from fastrl.kernels import kept_hidden as kept_hidden_kernel
from fastrl.kernels import kept_products as kept_products_kernel
from fastrl.kernels import kept_statistics as kept_statistics_kernels
from fastrl.kernels import kept_weight as kept_weight_kernel
from fastrl.kernels import row_gradient as gradient_kernel
from fastrl.kernels import row_statistics as statistics_kernel
from fastrl.kernels import row_visit as visit_kernel
from fastrl.kernels.kept_restrict import kept_restrict
from fastrl.kernels.kept_sets import kept_sets
from fastrl.kernels.scale import scale_
from fastrl.ops.contract import ByToken, Kept, RowInputs, RowObjective, Statistics, Transform, Visit
from fastrl.ops.triton_formulas import device_objective

__all__ = [
    "advise",
    "kept_gradient",
    "kept_hidden",
    "kept_products",
    "kept_restrict",
    "kept_sets",
    "kept_statistics",
    "kept_weight",
    "row_gradient",
    "row_statistics",
    "row_visit",
    "scale_",
]


def advise(tensor: Tensor) -> None:
    """Nothing: see the C++ backend."""


def row_statistics(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> Statistics:
    """See `fastrl.ops.contract`."""
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
    """See `fastrl.ops.contract`; `out` may be `logits`."""
    gradient_kernel.row_gradient(logits, targets, mask, *transform, statistics, c, h, out)


def row_visit(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor | None = None,
) -> Visit:
    """See `fastrl.ops.contract`."""
    function, numbers = device_objective(objective)
    weights = inputs.advantages, inputs.policy_weights
    found = visit_kernel.row_visit(logits, out, targets, mask, *transform, function, numbers, *weights, *inputs[2:])
    return Visit(found[0], found[1], found[2:])


def _check_unit_strides(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 over its last dimension, got strides {x.stride()}")


def kept_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept) -> Tensor:
    """See `fastrl.ops.contract`."""
    _check_unit_strides(hidden=hidden, weight=weight, bias=bias)
    return kept_products_kernel.kept_products(hidden, weight, bias, *kept)


def kept_statistics(values: Tensor, targets: Tensor, kept: Kept, transform: Transform) -> Statistics:
    """See `fastrl.ops.contract`."""
    arguments = (values, targets, kept.token_ids, kept.offsets, kept.counts)
    return Statistics(*kept_statistics_kernels.kept_statistics(*arguments, *transform))


def kept_gradient(
    values: Tensor,
    targets: Tensor,
    kept: Kept,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    out: Tensor,
) -> None:
    """See `fastrl.ops.contract`; `out` may be `values`."""
    arguments = (values, targets, kept.token_ids, kept.offsets, kept.counts)
    kept_statistics_kernels.kept_gradient(*arguments, *transform, statistics, c, h, out)


def kept_hidden(gradient: Tensor, weight: Tensor, kept: Kept, out: Tensor) -> None:
    """See `fastrl.ops.contract`."""
    _check_unit_strides(weight=weight, out=out)
    kept_hidden_kernel.kept_hidden(gradient, weight, *kept, out)


def kept_weight(
    gradient: Tensor, hidden: Tensor, by_token: ByToken, out: Tensor | None, out_bias: Tensor | None, add: bool
) -> None:
    """See `fastrl.ops.contract`."""
    _check_unit_strides(hidden=hidden, out=out, out_bias=out_bias)
    ids, entries, rows = by_token
    kept_weight_kernel.kept_weight(gradient, hidden, ids, entries, rows, out, out_bias, add)
