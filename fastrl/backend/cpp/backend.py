"""The C++ backend for the CPU: the row functions of `fastrl.backend.contract`, compiled from `csrc/` on first use."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.backend.cpp.library import (
    ELEMENTS,
    TILE,
    TRANSFORM,
    call,
    layout,
    objective_arguments,
    pointer,
    tile,
    transform_arguments,
    why_unavailable,
)
from fastrl.backend.cpp.pair import pair_forward_gradient, pair_gradient, pair_statistics
from fastrl.backend.cpp.support import (
    find_support,
    gather_entries,
    scatter_entries,
    support_forward_gradient,
    support_gradient,
    support_hidden,
    support_products,
    support_restrict,
    support_statistics,
    support_weight,
)
from fastrl.backend.torch.support import by_token
from fastrl.base.pages import zeros as blank
from fastrl.objectives.rows import RowInputs, RowObjective

#: Bytes of a huge page; there is none in less memory.
_HUGE_PAGE = 2 << 20

# The structs of csrc/rows.cpp.
_ROWS = layout(f"{TILE}2P{TRANSFORM}")
_GRADIENT = layout(f"6P{TILE}")


def _rows(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> bytes:
    _, a, b, vocab, *_ = fields = tile("logits", logits)
    if vocab == 0:
        raise ValueError(f"logits must have at least one column, got shape {tuple(logits.shape)}")
    per_row = pointer("targets", targets, a * b, torch.int64), pointer("mask", mask, a * b, torch.bool)
    return _ROWS.pack(*fields, *per_row, *transform_arguments(transform, a * b))


def _gradient(out: Tensor, logits: Tensor, even: bool) -> tuple[int, ...]:
    """The fields of a gradient's Tile, whose rows are equally far apart if `even`."""
    _, a, b, _, stride_a, stride_b, *_ = fields = tile("out", out)
    narrower = logits.dtype == torch.float32
    uneven = even and a > 1 and b > 1 and stride_a != b * stride_b
    if out.shape != logits.shape or not (narrower or out.dtype == logits.dtype) or uneven:
        allowed = "float32, bfloat16 or float16" if narrower else str(logits.dtype)
        rows = " with rows equally far apart" if even else ""
        got = f"{out.dtype} {tuple(out.shape)}, strides {out.stride()}"
        raise ValueError(f"out must be {allowed} {tuple(logits.shape)}{rows}, got {got}")
    return fields


def row_statistics(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> Statistics:
    """See `fastrl.backend.contract`."""
    out = torch.empty(4, targets.numel(), dtype=torch.float32, device="cpu")
    call("fastrl_row_statistics", _rows(logits, targets, mask, transform), out.data_ptr())
    return Statistics(*out)


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
    """See `fastrl.backend.contract`. Asks for huge pages if `out` is not the logits."""
    per_row = {**statistics._asdict(), "c": c, "h": h}
    addresses = (pointer(name, value, targets.numel()) for name, value in per_row.items())
    gradient = _GRADIENT.pack(*addresses, *_gradient(out, logits, even=False))
    call("fastrl_row_gradient", _rows(logits, targets, mask, transform), gradient)


def row_forward_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor | None = None,
) -> LossTerms:
    """See `fastrl.backend.contract`. The objective runs in float64 on the rows' float32 values."""
    beside: tuple[int | None, int, int] = None, 0, 0
    if out is not None:
        at, _, b, _, stride_a, stride_b, element, _ = _gradient(out, logits, even=True)
        beside = at, element, stride_b if b > 1 else stride_a
    result, loss = objective_arguments(targets.numel(), objective, inputs, *beside)
    call("fastrl_row_forward_gradient", _rows(logits, targets, mask, transform), byref(loss))
    return result


def advise(tensor: Tensor) -> None:
    """Ask for huge pages for a new, contiguous tensor that is about to be filled."""
    if tensor.nbytes >= _HUGE_PAGE:
        call("fastrl_advise", tensor.data_ptr(), tensor.nbytes)
