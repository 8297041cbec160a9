"""The entries that are asked for in each row: gather their logits from a tile, scatter their gradients into one.

A program owns a row and takes BLOCK of its entries at a time, whose ids are in any order. Those outside the tile's
columns are skipped. The row's best entry is found in registers: no atomics, and no logits are read but the entries'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import Best, Entries
from fastrl.kernels.configuration import check_unit_strides, on_device, row_strides
from fastrl.kernels.jit import kernel

BLOCK, WARPS = 128, 1
NONE = tl.constexpr(2**31 - 1)  # in place of the id of the best entry, where there is none


@triton.jit
def entry_pointers(logits_ptr, place, row, columns_b, stride_a, stride_b, offsets_ptr):
    """The start of the row's logits, and the range of its entries."""
    a, b = (place // columns_b).to(tl.int64), (place % columns_b).to(tl.int64)
    return logits_ptr + a * stride_a + b * stride_b, tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)


@kernel()
def gather_entries_kernel(
    logits_ptr,  # (A, B, V)
    rows_ptr,  # (A * B,) int64
    token_ids_ptr,  # (nnz,) int32
    offsets_ptr,  # (N + 1,) int64
    values_ptr,  # (nnz,) float32, output
    best_ids_ptr,  # (N,) int64, updated
    best_values_ptr,  # (N,) float32, updated
    targets_ptr,  # (A * B,) int64, output
    columns_b: tl.int32,  # B
    width: tl.int32,  # V
    first: tl.int32,  # the vocabulary entry of column 0
    stride_a: tl.int64,
    stride_b: tl.int64,
    BLOCK: tl.constexpr,
):
    """Program (row of the logits,)."""
    # Load: the row's entries and its best one so far.
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    row_ptr, begin, end = entry_pointers(logits_ptr, place, row, columns_b, stride_a, stride_b, offsets_ptr)
    best_id, best = tl.load(best_ids_ptr + row), tl.load(best_values_ptr + row)

    # Loop: each lane keeps the best of its entries.
    largest, lowest = tl.full([BLOCK], -float("inf"), tl.float32), tl.full([BLOCK], NONE, tl.int32)
    for k in range(begin, end, BLOCK):
        places = k + tl.arange(0, BLOCK)
        # From the id, not its difference from `first`: that could overflow.
        ids = tl.load(token_ids_ptr + places, mask=places < end, other=-1)
        here = (ids >= first) & (ids.to(tl.int64) < first.to(tl.int64) + width)
        columns = tl.where(here, ids, first) - first
        x = tl.load(row_ptr + columns, mask=here, other=-float("inf")).to(tl.float32)
        tl.store(values_ptr + places, x, mask=here)
        better = here & ((x > largest) | ((x == largest) & (ids < lowest)))
        largest, lowest = tl.where(better, x, largest), tl.where(better, ids, lowest)

    # Store: the best of the lanes, if it is better than that of the earlier slices, whose ids are others.
    found = tl.max(largest, axis=0)
    found_id = tl.min(tl.where(largest == found, lowest, NONE), axis=0)
    moved = (found_id != NONE) & ((best_id < 0) | (found > best) | ((found == best) & (found_id < best_id)))
    tl.store(targets_ptr + place, tl.where(moved, found_id - first, -1).to(tl.int64))
    tl.store(best_ids_ptr + row, tl.where(moved, found_id.to(tl.int64), best_id))
    tl.store(best_values_ptr + row, tl.where(moved, found, best))


@kernel()
def scatter_entries_kernel(
    out_ptr,  # (A, B, V), output
    rows_ptr,  # (A * B,) int64
    token_ids_ptr,  # (nnz,) int32
    offsets_ptr,  # (N + 1,) int64
    gradient_ptr,  # (nnz,) float32
    columns_b: tl.int32,  # B
    width: tl.int32,  # V
    first: tl.int32,  # the vocabulary entry of column 0
    stride_a: tl.int64,
    stride_b: tl.int64,
    BLOCK: tl.constexpr,
):
    """Program (row of the logits,)."""
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    row_ptr, begin, end = entry_pointers(out_ptr, place, row, columns_b, stride_a, stride_b, offsets_ptr)
    for k in range(begin, end, BLOCK):
        places = k + tl.arange(0, BLOCK)
        ids = tl.load(token_ids_ptr + places, mask=places < end, other=-1)
        here = (ids >= first) & (ids.to(tl.int64) < first.to(tl.int64) + width)
        gradient = tl.load(gradient_ptr + places, mask=here, other=0.0)
        tl.store(row_ptr + tl.where(here, ids, first) - first, gradient.to(out_ptr.dtype.element_ty), mask=here)


def gather_entries(
    logits: Tensor,  # (A, B, V)
    first: int,
    rows: Tensor,  # (A * B,) int64
    entries: Entries,
    values: Tensor,  # (nnz,) float32
    best: Best,
) -> Tensor:
    """See `fastrl.backend.contract`."""
    check_unit_strides(logits=logits)
    targets = torch.empty_like(rows)
    if rows.numel():
        b, *strides = row_strides(logits)
        with on_device(logits):
            gather_entries_kernel[(rows.numel(),)](
                *(logits, rows, *entries, values, *best, targets),
                *(b, logits.shape[-1], first, *strides),
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return targets


def scatter_entries(
    gradient: Tensor,  # (nnz,) float32
    first: int,
    rows: Tensor,  # (A * B,) int64
    entries: Entries,
    out: Tensor,  # (A, B, V)
) -> None:
    """See `fastrl.backend.contract`."""
    check_unit_strides(out=out)
    if rows.numel():
        b, *strides = row_strides(out)
        with on_device(out):
            scatter_entries_kernel[(rows.numel(),)](
                *(out, rows, *entries, gradient), *(b, out.shape[-1], first, *strides), BLOCK=BLOCK, num_warps=WARPS
            )
