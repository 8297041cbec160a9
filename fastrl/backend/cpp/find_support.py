"""The entries that a sampler keeps, on the CPU: `csrc/find_support.h` says how, and how often a row is read."""

from __future__ import annotations

import math
from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from fastrl.backend.cpp.library import ELEMENTS, address, function, strides

_WRONG = {-1: "a NaN", -2: "a +inf", -3: "nothing but -inf"}


class _Search(Structure):
    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int64) for name in ("a", "b", "vocab", "stride_a", "stride_b", "top_k")),
        *((name, c_double) for name in ("temperature", "top_p", "log_min_p")),
        *((name, c_void_p) for name in ("pivots", "firsts", "counts")),
        ("element", c_int32),
        ("threads", c_int32),
    )


def find_support(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """See `fastrl.backend.contract`. Beyond the result it uses 16 bytes per row, and one float32 row per thread."""
    logits_strides = strides("logits", logits)
    a, b, vocab = logits.shape
    rows = a * b
    pivots, firsts, counts = (
        torch.empty(rows, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.int32, torch.int64)
    )
    search = _Search(
        address("logits", logits),
        a,
        b,
        vocab,
        *logits_strides,
        top_k,
        temperature,
        top_p,
        math.log(min_p) if min_p > 0 else -math.inf,
        pivots.data_ptr(),
        firsts.data_ptr(),
        counts.data_ptr(),
        ELEMENTS[logits.dtype],
        torch.get_num_threads(),
    )
    function("fastrl_find_support_choose", POINTER(_Search))(byref(search))
    wrong = (counts < 0).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"logits row {row} has {_WRONG[int(counts[row])]}")
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=offsets[1:])
    token_ids = torch.empty(int(offsets[-1]), dtype=torch.int32, device="cpu")
    function("fastrl_find_support_write", POINTER(_Search), c_void_p, c_void_p)(
        byref(search), offsets.data_ptr(), token_ids.data_ptr()
    )
    return token_ids, offsets
