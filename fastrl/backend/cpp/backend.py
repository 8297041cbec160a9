"""The C++ backend for the CPU: the row functions of `fastrl.backend.contract`, compiled from `csrc/` on first use."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.backend.cpp.entries import gather_entries, scatter_entries
from fastrl.backend.cpp.find_support import find_support
from fastrl.backend.cpp.library import ELEMENTS, address, function, pointer, strides, why_unavailable
from fastrl.backend.cpp.objective import LossArguments, objective_arguments
from fastrl.backend.cpp.pair import pair_forward_gradient, pair_gradient, pair_statistics
from fastrl.backend.cpp.support import (
    support_forward_gradient,
    support_gradient,
    support_hidden,
    support_products,
    support_restrict,
    support_statistics,
    support_weight,
)
from fastrl.backend.torch.backend import scale
from fastrl.backend.torch.support import by_token
from fastrl.base.pages import zeros as blank
from fastrl.objectives.rows import RowInputs, RowObjective

__all__ = [
    "advise",
    "blank",
    "by_token",
    "find_support",
    "gather_entries",
    "pair_forward_gradient",
    "pair_gradient",
    "pair_statistics",
    "row_forward_gradient",
    "row_gradient",
    "row_statistics",
    "scale",
    "scatter_entries",
    "support_forward_gradient",
    "support_gradient",
    "support_hidden",
    "support_products",
    "support_restrict",
    "support_statistics",
    "support_weight",
    "why_unavailable",
]


#: Bytes of a huge page; there is none in less memory.
_HUGE_PAGE = 2 << 20


class _Rows(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("a", c_int64),
        ("b", c_int64),
        ("vocab", c_int64),
        ("stride_a", c_int64),
        ("stride_b", c_int64),
        ("targets", c_void_p),
        ("mask", c_void_p),
        ("temperatures", c_void_p),
        ("temperature", c_double),
        ("logit_scale", c_double),
        ("softcap", c_double),
        ("element", c_int32),
        ("threads", c_int32),
    )


class _Gradient(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logprobs", "entropy", "maximum", "log_sum", "c", "h", "out")),
        ("stride_a", c_int64),
        ("stride_b", c_int64),
        ("element", c_int32),
    )


def _rows(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> _Rows:
    logits_strides = strides("logits", logits)
    a, b, vocab = logits.shape
    if vocab == 0:
        raise ValueError(f"logits must have at least one column, got shape {tuple(logits.shape)}")
    return _Rows(
        address("logits", logits),
        a,
        b,
        vocab,
        *logits_strides,
        pointer("targets", targets, a * b, torch.int64),
        pointer("mask", mask, a * b, torch.bool),
        pointer("temperatures", transform.temperatures, a * b),
        transform.temperature,
        transform.logit_scale,
        transform.softcap,
        ELEMENTS[logits.dtype],
        torch.get_num_threads(),
    )


def _holds_gradient(out: Tensor, logits: Tensor) -> bool:
    """Whether `out` has a dtype for the gradient of these logits."""
    return out.dtype == logits.dtype or (logits.dtype == torch.float32 and out.dtype in ELEMENTS)


def _allowed(logits: Tensor) -> str:
    return "float32, bfloat16 or float16" if logits.dtype == torch.float32 else str(logits.dtype)


def row_statistics(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> Statistics:
    """See `fastrl.backend.contract`."""
    out = torch.empty(4, targets.numel(), dtype=torch.float32, device="cpu")
    function("fastrl_row_statistics", POINTER(_Rows), c_void_p)(
        byref(_rows(logits, targets, mask, transform)), out.data_ptr()
    )
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
    n = targets.numel()
    out_strides = strides("out", out)
    if out.shape != logits.shape or not _holds_gradient(out, logits):
        raise ValueError(f"out must be {_allowed(logits)} {tuple(logits.shape)}, got {out.dtype} {tuple(out.shape)}")
    gradient = _Gradient(
        *(pointer(name, value, n) for name, value in statistics._asdict().items()),
        pointer("c", c, n),
        pointer("h", h, n),
        address("out", out),
        *out_strides,
        ELEMENTS[out.dtype],
    )
    function("fastrl_row_gradient", POINTER(_Rows), POINTER(_Gradient))(
        byref(_rows(logits, targets, mask, transform)), byref(gradient)
    )


def _beside(out: Tensor, logits: Tensor) -> tuple[int, int, int]:
    """The address of the gradient beside the logits, the number of its dtype, and the elements from row to row."""
    stride_a, stride_b = strides("out", out)
    a, b, _ = out.shape
    regular = a < 2 or b < 2 or stride_a == b * stride_b
    if out.shape != logits.shape or not _holds_gradient(out, logits) or not regular:
        got = f"{out.dtype} {tuple(out.shape)}, strides {out.stride()}"
        raise ValueError(f"out must be {_allowed(logits)} {tuple(logits.shape)} with rows equally far apart, got {got}")
    return address("out", out), ELEMENTS[out.dtype], stride_b if b > 1 else stride_a


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
    n = targets.numel()
    result, arguments = objective_arguments(n, objective, inputs, *((None,) if out is None else _beside(out, logits)))
    function("fastrl_row_forward_gradient", POINTER(_Rows), POINTER(LossArguments))(
        byref(_rows(logits, targets, mask, transform)), byref(arguments)
    )
    return result


def advise(tensor: Tensor) -> None:
    """Ask for huge pages for a new, contiguous tensor that is about to be filled."""
    if tensor.nbytes >= _HUGE_PAGE:
        function("fastrl_advise", c_void_p, c_int64)(tensor.data_ptr(), tensor.nbytes)
