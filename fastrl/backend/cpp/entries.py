"""The C++ backend's functions over the entries asked for (`csrc/entries.cpp`); see `fastrl.backend.contract`."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from fastrl.backend.contract import Best, Entries
from fastrl.backend.cpp.library import ELEMENTS, address, function, pointer, strides


class _Slice(Structure):
    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int64) for name in ("a", "b", "width", "stride_a", "stride_b", "first")),
        *((name, c_void_p) for name in ("rows", "ids", "offsets")),
        ("element", c_int32),
        ("threads", c_int32),
    )


def _slice(logits: Tensor, first: int, rows: Tensor, entries: Entries) -> _Slice:
    logits_strides = strides("logits", logits)
    a, b, width = logits.shape
    return _Slice(
        address("logits", logits),
        *(a, b, width, *logits_strides, first),
        pointer("rows", rows, a * b, torch.int64),
        pointer("token_ids", entries.token_ids, entries.token_ids.numel(), torch.int32),
        pointer("offsets", entries.offsets, entries.offsets.numel(), torch.int64),
        ELEMENTS[logits.dtype],
        torch.get_num_threads(),
    )


def gather_entries(logits: Tensor, first: int, rows: Tensor, entries: Entries, values: Tensor, best: Best) -> Tensor:
    """See `fastrl.backend.contract`."""
    targets, count = torch.empty_like(rows), entries.offsets.numel() - 1
    function("fastrl_gather_entries", POINTER(_Slice), c_void_p, c_void_p, c_void_p, c_void_p)(
        byref(_slice(logits, first, rows, entries)),
        pointer("values", values, entries.token_ids.numel()),
        pointer("best.ids", best.ids, count, torch.int64),
        pointer("best.values", best.values, count),
        targets.data_ptr(),
    )
    return targets


def scatter_entries(gradient: Tensor, first: int, rows: Tensor, entries: Entries, out: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    function("fastrl_scatter_entries", POINTER(_Slice), c_void_p)(
        byref(_slice(out, first, rows, entries)), pointer("gradient", gradient, entries.token_ids.numel())
    )
