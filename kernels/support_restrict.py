"""Set logits to -inf outside their rows' recorded support, for rows whose support is too wide to gather.

A program owns a row and a block of its columns. Ids ascend within a row, so those in the block are a range, found by
two binary searches; all other columns are overwritten. No logits are read, and a column is written at most once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.configuration import on_device
from fastrl.kernels.jit import kernel

BLOCK, IDS = 512, 32


@triton.jit
def first_not_below(ids_ptr, begin, end, bound):
    """The first index in [begin, end) of ascending ids whose id is >= bound; end if there is none."""
    while begin < end:
        middle = (begin + end) // 2
        if tl.load(ids_ptr + middle) < bound:
            begin = middle + 1
        else:
            end = middle
    return begin


@kernel()
def support_restrict_kernel(
    logits_ptr,  # (n, v), unit stride on v
    rows_ptr,  # (n,) int64
    token_ids_ptr,  # (nnz,) int32
    offsets_ptr,  # (N + 1,) int64
    width: tl.int32,  # v
    stride: tl.int64,  # from row to row
    first: tl.int32,  # the vocabulary entry of column 0
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
):
    """Program (row, block)."""
    # Load: the row's ids. A row without ids keeps all its logits.
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    if begin == end:
        return
    start = tl.program_id(1) * BLOCK
    begin = first_not_below(token_ids_ptr, begin, end, first + start)
    end = first_not_below(token_ids_ptr, begin, end, first + tl.minimum(start + BLOCK, width))

    # Loop: compare the block's ids, a few at a time, with all of its columns.
    columns = start + tl.arange(0, BLOCK)
    hits = tl.zeros([BLOCK], tl.int32)
    for k in range(begin, end, IDS):
        places = k + tl.arange(0, IDS)
        ids = tl.load(token_ids_ptr + places, mask=places < end, other=-1)
        hits += tl.sum((ids[:, None] - first == columns[None, :]).to(tl.int32), axis=0)

    # Store.
    pointers = logits_ptr + place * stride + columns
    nothing = tl.full([BLOCK], -float("inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(pointers, nothing, mask=(hits == 0) & (columns < width))


def support_restrict(
    logits: Tensor,  # (n, v), unit stride on v
    first: int,
    rows: Tensor,  # (n,) int64
    token_ids: Tensor,  # (nnz,) int32
    offsets: Tensor,  # (N + 1,) int64
) -> None:
    """Set the entries of [first, first + v) that the rows do not keep to -inf."""
    n, width = logits.shape
    if n == 0:
        return
    with on_device(logits):
        support_restrict_kernel[(n, triton.cdiv(width, BLOCK))](
            logits, rows, token_ids, offsets, width, logits.stride(0), first, BLOCK=BLOCK, IDS=IDS, num_warps=4
        )
