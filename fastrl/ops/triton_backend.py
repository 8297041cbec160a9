"""The Triton backend: the row functions of `fastrl.ops.contract`, launches only. Imported when it is first used."""

from __future__ import annotations

from torch import Tensor

from fastrl.kernels import linear_statistics as linear_kernel
from fastrl.kernels import row_gradient as gradient_kernel
from fastrl.kernels import row_statistics as statistics_kernel
from fastrl.kernels import row_visit as visit_kernel
from fastrl.kernels.scale import scale_
from fastrl.ops.contract import RowInputs, RowObjective, Statistics, Transform, Visit
from fastrl.ops.triton_formulas import device_objective

__all__ = ["advise", "row_gradient", "row_statistics", "row_visit", "scale_"]


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
) -> Visit:
    """See `fastrl.ops.contract`; the gradient overwrites the logits."""
    function, numbers = device_objective(objective)
    weights = inputs.advantages, inputs.policy_weights
    out = visit_kernel.row_visit(logits, targets, mask, *transform, function, numbers, *weights, *inputs[2:])
    return Visit(out[0], out[1], out[2:])


def linear_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: Transform
) -> Statistics:
    """`row_statistics` of the logits hidden (N, H) weight (V, H)^T + bias, none of which is stored; all rows count.

    Nothing uses it by default: it becomes the default only where a measurement on a GPU says that it beats the library
    GEMM + row kernel. Its logits are float32, where a GEMM rounds them to the matrices' dtype; so log-probabilities of
    one run that are to be compared must all come from here, or none.
    """
    return Statistics(*linear_kernel.linear_statistics(hidden, weight, bias, targets, *transform))
