"""The C++ backend's functions over a few entries per row: supports, found and given, and entries asked for.

See `fastrl.backend.contract`, and `csrc/support.cpp`, `csrc/find_support.h` and `csrc/entries.cpp`.
"""

from __future__ import annotations

import math
from ctypes import byref

import torch
from torch import Tensor

from fastrl.backend.contract import Best, ByToken, Entries, LossTerms, Statistics, Support, Transform, offsets_of
from fastrl.backend.cpp.library import (
    ELEMENTS,
    TILE,
    TRANSFORM,
    address,
    call,
    layout,
    objective_arguments,
    pointer,
    tile,
    transform_arguments,
)
from fastrl.objectives.rows import RowInputs, RowObjective

# The structs of csrc/support.cpp,
_SUPPORT = layout("3Pqi")
_FACTORS = layout("3P3qi")
_ROW_ARGUMENTS = layout(f"P{TRANSFORM}")
_BY_TOKEN = layout("3P2q2i")
_STATISTICS = layout("4P")
# of csrc/find_support.cpp
_SEARCH = layout(f"{TILE}q3d3P")
# and of csrc/entries.cpp.
_SLICE = layout(f"{TILE}q3P")

_WRONG = {-1: "a NaN", -2: "a +inf", -3: "nothing but -inf"}


# --- supports ---------------------------------------------------------------------------------------------------------


def _support(token_ids: Tensor, offsets: Tensor, valid: Tensor | None) -> bytes:
    rows = offsets.numel() - 1
    return _SUPPORT.pack(
        pointer("token_ids", token_ids, token_ids.numel(), torch.int32),
        pointer("offsets", offsets, rows + 1, torch.int64),
        pointer("valid", valid, rows, torch.bool),
        rows,
        torch.get_num_threads(),
    )


def _matrix(name: str, matrix: Tensor | None, like: Tensor | None = None) -> tuple[int, int]:
    """The address of a matrix and its row stride; its dtype must be that of `like`, unless None."""
    if matrix is None:
        return 0, 0
    fits = matrix.dtype in ELEMENTS if like is None else matrix.dtype == like.dtype
    unit = matrix.dim() == 2 and (matrix.shape[1] <= 1 or matrix.stride(1) == 1)
    if not fits or not unit or matrix.device.type != "cpu":
        raise ValueError(
            f"{name} must be a matrix on the CPU with contiguous rows, got {matrix.dtype}, shape"
            f" {tuple(matrix.shape)}, strides {matrix.stride()} on {matrix.device}"
        )
    return address(name, matrix), matrix.stride(0)


def _factors(hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None = None) -> bytes:
    factor = weight if hidden is None else hidden
    assert factor is not None
    hidden_at, hidden_stride = _matrix("hidden", hidden)
    weight_at, weight_stride = _matrix("weight", weight, factor)
    bias_at = 0 if bias is None else pointer("bias", bias, bias.numel(), factor.dtype)
    width, element = factor.shape[1], ELEMENTS[factor.dtype]
    return _FACTORS.pack(hidden_at, weight_at, bias_at, hidden_stride, weight_stride, width, element)


def _arguments(targets: Tensor, transform: Transform) -> bytes:
    rows = targets.numel()
    return _ROW_ARGUMENTS.pack(pointer("targets", targets, rows, torch.int64), *transform_arguments(transform, rows))


def support_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, support: Support) -> Tensor:
    """See `fastrl.backend.contract`."""
    bias = None if bias is None else bias.contiguous()
    values = torch.empty(support.token_ids.numel(), dtype=torch.float32, device="cpu")
    call("fastrl_support_products", _support(*support), _factors(hidden, weight, bias), values.data_ptr())
    return values


def support_statistics(values: Tensor, targets: Tensor, support: Support, transform: Transform) -> Statistics:
    """See `fastrl.backend.contract`."""
    out = torch.empty(4, targets.numel(), dtype=torch.float32, device="cpu")
    at = pointer("values", values, support.token_ids.numel())
    call("fastrl_support_statistics", _support(*support), _arguments(targets, transform), at, out.data_ptr())
    return Statistics(*out)


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
    """See `fastrl.backend.contract`."""
    n, nnz = targets.numel(), support.token_ids.numel()
    call(
        "fastrl_support_gradient",
        _support(*support),
        _arguments(targets, transform),
        pointer("values", values, nnz),
        _STATISTICS.pack(*(pointer(name, value, n) for name, value in statistics._asdict().items())),
        pointer("c", c, n),
        pointer("h", h, n),
        pointer("out", out, nnz),
    )


def support_forward_gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor,
) -> LossTerms:
    """See `fastrl.backend.contract`. The objective runs in float64 on the rows' float32 values."""
    nnz = support.token_ids.numel()
    result, loss = objective_arguments(targets.numel(), objective, inputs, pointer("out", out, nnz))
    at = pointer("values", values, nnz)
    call("fastrl_support_forward_gradient", _support(*support), _arguments(targets, transform), at, byref(loss))
    return result


def support_hidden(gradient: Tensor, weight: Tensor, support: Support, out: Tensor, keep: bool) -> None:
    """See `fastrl.backend.contract`."""
    at = pointer("gradient", gradient, support.token_ids.numel())
    call("fastrl_support_hidden", _support(*support), _factors(None, weight), at, *_matrix("out", out, weight))


def support_weight(
    gradient: Tensor, hidden: Tensor, by_token: ByToken, out: Tensor | None, out_bias: Tensor | None, add: bool
) -> None:
    """See `fastrl.backend.contract`."""
    by_vocab, nnz = out if out is not None else out_bias, by_token.token_ids.numel()
    if by_vocab is None or nnz == 0:
        return
    sorted_entries = _BY_TOKEN.pack(
        pointer("token_ids", by_token.token_ids, nnz, torch.int32),
        pointer("entries", by_token.entries, nnz, torch.int64),
        pointer("rows", by_token.rows, nnz, torch.int32),
        nnz,
        by_vocab.shape[0],
        torch.get_num_threads(),
        add,
    )
    call(
        "fastrl_support_weight",
        sorted_entries,
        _factors(hidden, None),
        pointer("gradient", gradient, gradient.numel()),
        *_matrix("out", out, hidden),
        0 if out_bias is None else pointer("out_bias", out_bias, out_bias.numel(), hidden.dtype),
    )


def support_restrict(logits: Tensor, first: int, rows: Tensor, token_ids: Tensor, offsets: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    n, width = logits.shape
    at, stride = _matrix("logits", logits)
    tile_of_rows = pointer("rows", rows, n, torch.int64), n, at, width, stride, first, ELEMENTS[logits.dtype]
    call("fastrl_support_restrict", _support(token_ids, offsets, None), *tile_of_rows)


def find_support(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """See `fastrl.backend.contract`. Beyond the result it uses 16 bytes per row, and one float32 row per thread."""
    _, a, b, *_ = fields = tile("logits", logits)
    rows = a * b
    pivots, firsts, counts = (
        torch.empty(rows, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.int32, torch.int64)
    )
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    work = (x.data_ptr() for x in (pivots, firsts, counts))
    search = _SEARCH.pack(*fields, top_k, temperature, top_p, log_min_p, *work)
    call("fastrl_find_support_choose", search)
    wrong = (counts < 0).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"logits row {row} has {_WRONG[int(counts[row])]}")
    offsets = offsets_of(counts)
    token_ids = torch.empty(int(offsets[-1]), dtype=torch.int32, device="cpu")
    call("fastrl_find_support_write", search, offsets.data_ptr(), token_ids.data_ptr())
    return token_ids, offsets


# --- entries asked for ------------------------------------------------------------------------------------------------


def _slice(logits: Tensor, first: int, rows: Tensor, entries: Entries) -> bytes:
    _, a, b, *_ = fields = tile("logits", logits)
    return _SLICE.pack(
        *fields,
        first,
        pointer("rows", rows, a * b, torch.int64),
        pointer("token_ids", entries.token_ids, entries.token_ids.numel(), torch.int32),
        pointer("offsets", entries.offsets, entries.offsets.numel(), torch.int64),
    )


def gather_entries(logits: Tensor, first: int, rows: Tensor, entries: Entries, values: Tensor, best: Best) -> Tensor:
    """See `fastrl.backend.contract`."""
    targets, count = torch.empty_like(rows), entries.offsets.numel() - 1
    call(
        "fastrl_gather_entries",
        _slice(logits, first, rows, entries),
        pointer("values", values, entries.token_ids.numel()),
        pointer("best.ids", best.ids, count, torch.int64),
        pointer("best.values", best.values, count),
        targets.data_ptr(),
    )
    return targets


def scatter_entries(gradient: Tensor, first: int, rows: Tensor, entries: Entries, out: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    at = pointer("gradient", gradient, entries.token_ids.numel())
    call("fastrl_scatter_entries", _slice(out, first, rows, entries), at)
