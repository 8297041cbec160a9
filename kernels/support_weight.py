"""Support weight: the head's gradient from the support entries, summed per token in order; no atomics, no host sync.

The entries are sorted by token, so a token's entries are a segment. A program owns the segments that begin among its
GROUP positions, and a chunk of their columns. It starts at the first such beginning and takes STEP positions at a time,
whose hidden rows are loaded together; it writes a sum wherever a segment ends. A common token may have as many entries
as there are rows, so its segment is split into pieces, each owned by the program in whose group it begins. The pieces'
sums go to float32 rows that a second kernel adds. Splits count from the segment's head, so a sum depends only on its
own entries.

A segment's first piece has 2 * PIECE entries and the others PIECE. The piece [k, stop), if another follows or precedes
it, may use row stop // PIECE - 1 of the partial sums and shares it with no other piece. For a first piece, that row is
the whole block of PIECE positions in its middle; for a later one, the block in which it begins, and two beginnings of
different segments are more than PIECE apart. So nnz / PIECE rows are enough, and a segment's rows are consecutive.

`segment_sums` also serves `support_hidden`, whose segments are the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import ByToken, Support
from fastrl.kernels.configuration import _WARP, check_unit_strides, on_device
from fastrl.kernels.jit import kernel
from fastrl.kernels.support_products import chunk, entry_rows, launch_options, vector

GROUP = 32  # positions: few enough for small batches to fill a GPU, enough to pay for a program's start
PIECE = 256
PIECES_STEP = 8  # pieces added together
PIECES_CHUNK = 512  # columns of a program that adds pieces: a float32 vector per thread
EMPTY_ROWS = 16  # of a program that writes zeros
HEADS_BLOCK = 256


@kernel()
def heads_kernel(
    ids_ptr,  # (nnz,) int32, ascending
    entries_ptr,  # (nnz,) int64; None with sorted_rows_ptr
    rows_ptr,  # (nnz,) int32: the row of each entry; None with sorted_rows_ptr
    heads_ptr,  # (segments,) int64, output: the first position whose id is not less
    sorted_rows_ptr,  # (nnz,) int32, output: rows[entries]; or None
    nnz: tl.int64,
    segments: tl.int32,
    steps: tl.int32,  # 2**steps > nnz
    BLOCK: tl.constexpr,
):
    """Program (block of segments and of positions,)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int64)
    high = low + tl.where(place < segments, nnz, 0)
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        below = searching & (tl.load(ids_ptr + middle, mask=searching, other=0) < place)
        low = tl.where(below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    tl.store(heads_ptr + place, low, mask=place < segments)
    if sorted_rows_ptr is not None:
        entry = tl.load(entries_ptr + place, mask=place < nnz, other=0)
        tl.store(sorted_rows_ptr + place, tl.load(rows_ptr + entry, mask=place < nnz, other=0), mask=place < nnz)


@triton.jit
def load_id(pointers, mask, segments):
    """The segments of positions; -1 for a position without a segment."""
    found = tl.load(pointers, mask=mask, other=-1)
    return tl.where(found < segments, found, -1)


@triton.jit
def store_sum(out_ptr, value, mask, ADD: tl.constexpr):
    """Store a sum, or add it to the existing value in float32; rounded once."""
    if ADD:
        value += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, value.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(aligned=("source_ptr", "out_ptr", "partials_ptr"))
def segment_sums_kernel(
    gradient_ptr,  # (nnz,) float32
    entries_ptr,  # (nnz,) int64: the index of each position's gradient; None: the position itself
    source_rows_ptr,  # (nnz,) int32: the row of `source` of each position
    ids_ptr,  # (nnz,) int32: the segment of each position, equal ones together; >= segments: none
    heads_ptr,  # (segments,) int64: the first position of each segment that has any, else any number
    source_ptr,  # (*, H), unit stride on H; None with out_ptr
    out_ptr,  # (segments, H), unit stride on H; or None
    out_bias_ptr,  # (segments,), or None
    partials_ptr,  # (ceil(nnz / PIECE), H) float32: sums of pieces; None with out_ptr
    bias_partials_ptr,  # (ceil(nnz / PIECE),) float32; None with out_bias_ptr
    nnz: tl.int64,
    segments: tl.int32,
    hidden_size: tl.int32,  # H
    stride_source: tl.int64,
    stride_out: tl.int64,
    ADD: tl.constexpr,
    VEC: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Program (group, chunk)."""
    # Positions count from the group's first one, in 32 bits.
    first = tl.program_id(0).to(tl.int64) * GROUP
    left = tl.minimum(nnz - first, 1 << 30).to(tl.int32)
    last = tl.minimum(left, GROUP)
    ids_ptr += first
    if entries_ptr is not None:
        entries_ptr += first
    else:
        gradient_ptr += first
    if out_ptr is not None:
        source_rows_ptr += first
        columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        # Aligned matrices have strides and lengths of whole vectors; `// VEC * VEC` shows it: loads are 16 bytes wide.
        length = hidden_size // VEC * VEC
        column_mask = columns < length
        total = tl.zeros([CHUNK], tl.float32)
    if out_bias_ptr is not None:
        total_bias = 0.0

    # Load: the group's offset in its first segment, and the next split of that segment.
    before = load_id(ids_ptr - 1, first > 0, segments)
    own = load_id(ids_ptr, left > 0, segments)
    done = first - tl.load(heads_ptr + own, mask=own >= 0, other=0)
    stop = (tl.maximum((done + PIECE - 1) // PIECE, 2) * PIECE - done).to(tl.int32)
    live = left < 0  # initially false: whether a piece that began in this group continues
    later = live  # whether that piece is not its segment's first

    # Loop.
    k = 0
    while (k < last) | live:
        # Classify the step's positions. All loads of rows come before the first store; bit j of `starts` and `ends`
        # belongs to position j, because predicate registers are few.
        starts = 0
        ends = 0
        places = tl.tuple(())  # where a piece that ends here is stored: its segment, or -stop for a partial sum
        gradients = tl.tuple(())
        rows = tl.tuple(())
        for j in tl.static_range(STEP):
            at = k + j
            after = load_id(ids_ptr + at + 1, at + 1 < left, segments)
            start = (own >= 0) & ((own != before) | (at == stop))
            live = (live | start) & (own >= 0) & ((at < last) | (not start))
            later = tl.where(start, own == before, later)
            stop = tl.where(start, at + tl.where(own == before, PIECE, 2 * PIECE), stop)
            cut = (own == after) & (at + 1 == stop)
            end = live & ((own != after) | cut)
            starts |= start.to(tl.int32) << j
            ends |= end.to(tl.int32) << j
            places += (tl.where(cut | later, -stop, own),)
            if entries_ptr is not None:
                entry = tl.load(entries_ptr + at, mask=live, other=0)
            else:
                entry = at
            gradients += (tl.load(gradient_ptr + entry, mask=live, other=0.0),)
            if out_ptr is not None:
                row = tl.load(source_rows_ptr + at, mask=live, other=0)
                pointers = source_ptr + row.to(tl.int64) * (stride_source // VEC * VEC) + columns
                # Not `column_mask & live`: the interpreter turns a scalar condition combined with a block into numbers.
                mask = columns < tl.where(live, length, 0)
                rows += (tl.load(pointers, mask=mask, other=0.0),)
            live = live & (not end)
            before = own
            own = after

        for j in tl.static_range(STEP):
            fresh = (starts >> j) & 1 != 0
            if out_ptr is not None:
                total = tl.fma(rows[j].to(tl.float32), gradients[j], tl.where(fresh, 0.0, total))
            if out_bias_ptr is not None:
                total_bias = tl.where(fresh, 0.0, total_bias) + gradients[j]
            if (ends >> j) & 1 != 0:
                place = places[j].to(tl.int64)
                slot = (first - place) // PIECE - 1
                if out_ptr is not None:
                    if place < 0:
                        tl.store(partials_ptr + slot * length + columns, total, mask=column_mask)
                    else:
                        row_ptr = out_ptr + place * (stride_out // VEC * VEC)
                        store_sum(row_ptr + columns, total, column_mask, ADD)
                if out_bias_ptr is not None:  # noqa: SIM102  (at compile time; the next at run time)
                    if tl.program_id(1) == 0:
                        if place < 0:
                            tl.store(bias_partials_ptr + slot, total_bias)
                        else:
                            store_sum(out_bias_ptr + place, total_bias, True, ADD)
        k += STEP


@kernel(aligned=("out_ptr", "partials_ptr"))
def add_pieces_kernel(
    ids_ptr,  # (nnz,) int32, as in `segment_sums_kernel`
    heads_ptr,  # (segments,) int64
    out_ptr,  # (segments, H), unit stride on H; or None
    out_bias_ptr,  # (segments,), or None
    partials_ptr,  # (ceil(nnz / PIECE), H) float32; None with out_ptr
    bias_partials_ptr,  # (ceil(nnz / PIECE),) float32; None with out_bias_ptr
    nnz: tl.int64,
    slots: tl.int32,
    segments: tl.int32,
    hidden_size: tl.int32,  # H
    stride_out: tl.int64,
    ADD: tl.constexpr,
    VEC: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (slot, chunk) adds the pieces of the segment whose first piece owns this row of the partial sums.

    Programs beyond the slots write zeros to those of ROWS segments each that have no position.
    """
    slot = tl.program_id(0).to(tl.int64)
    own = load_id(ids_ptr + slot * PIECE, (slot < slots) & (slot * PIECE < nnz), segments)
    head = tl.load(heads_ptr + own, mask=own >= 0, other=0)
    # Piece i > 0 begins at head + PIECE (i + 1), if the segment has that position.
    second = load_id(ids_ptr + head + 2 * PIECE, (own >= 0) & (head + 2 * PIECE < nnz), segments)
    if (own >= 0) & (head // PIECE + 1 == slot) & (second == own):
        if out_ptr is not None:
            columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
            length = hidden_size // VEC * VEC
            column_mask = columns < length
            total = tl.zeros([CHUNK], tl.float32)
        if out_bias_ptr is not None:
            total_bias = 0.0

        # Loop: STEP pieces at a time.
        i = tl.arange(0, STEP)
        begin = head + PIECE  # of piece 0, a position in it
        while load_id(ids_ptr + begin, begin < nnz, segments) == own:
            begins = begin + i * PIECE
            mask = load_id(ids_ptr + begins, begins < nnz, segments) == own
            if out_ptr is not None:
                pointers = partials_ptr + (slot + i)[:, None] * length + columns[None, :]
                total += tl.sum(tl.load(pointers, mask=mask[:, None] & column_mask[None, :], other=0.0), axis=0)
            if out_bias_ptr is not None:
                total_bias += tl.sum(tl.load(bias_partials_ptr + slot + i, mask=mask, other=0.0), axis=0)
            begin += STEP * PIECE
            slot += STEP

        # Store.
        if out_ptr is not None:
            store_sum(out_ptr + own.to(tl.int64) * (stride_out // VEC * VEC) + columns, total, column_mask, ADD)
        if out_bias_ptr is not None:  # noqa: SIM102  (at compile time; the next at run time)
            if tl.program_id(1) == 0:
                store_sum(out_bias_ptr + own, total_bias, True, ADD)

    block = tl.program_id(0) - slots
    if block >= 0:
        segment = block * ROWS + tl.arange(0, ROWS)
        exists = segment < segments
        place = tl.load(heads_ptr + segment, mask=exists, other=0)
        empty = exists & (tl.load(ids_ptr + place, mask=exists & (place < nnz), other=-1) != segment)
        if out_ptr is not None:
            within = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
            to = out_ptr + segment.to(tl.int64)[:, None] * (stride_out // VEC * VEC) + within[None, :]
            mask_to = empty[:, None] & (within < hidden_size // VEC * VEC)[None, :]
            tl.store(to, tl.zeros([ROWS, CHUNK], out_ptr.dtype.element_ty), mask=mask_to)
        if out_bias_ptr is not None:  # noqa: SIM102  (at compile time; the next at run time)
            if tl.program_id(1) == 0:
                tl.store(out_bias_ptr + segment, tl.zeros([ROWS], out_bias_ptr.dtype.element_ty), mask=empty)


def constants(vec: int, add: bool, warp: int = _WARP) -> dict[str, Any]:
    """The compile-time constants of `segment_sums_kernel`; of these only PIECE changes the bits of a sum.

    8 rows loaded together are 16 KB of bfloat16 in flight per program. That is 64 KB per multiprocessor, which 4
    programs fit with 128 registers per thread. On AMD, where a predicate takes two scalar registers, more than 4 rows
    spill.
    """
    step = 8 if warp == 32 else 4
    return {"ADD": add, "VEC": vec, "GROUP": GROUP, "STEP": step, "CHUNK": chunk(vec), "PIECE": PIECE}


def sums_options(itemsize: int, warp: int = _WARP) -> dict[str, Any]:
    """The compiler's options for `segment_sums_kernel`: a register limit with which 4 programs fit (3 in float32)."""
    return launch_options(warp) | ({"maxnreg": 128 if itemsize == 2 else 168} if warp == 32 else {})


def pieces_constants(vec: int, add: bool) -> dict[str, Any]:
    """The compile-time constants of `add_pieces_kernel`."""
    return {"ADD": add, "VEC": vec, "STEP": PIECES_STEP, "CHUNK": PIECES_CHUNK, "PIECE": PIECE, "ROWS": EMPTY_ROWS}


def segment_sums(
    gradient: Tensor,  # (nnz,) float32
    entries: Tensor | None,  # (nnz,) int64
    source_rows: Tensor,  # (nnz,) int32
    ids: Tensor,  # (nnz,) int32
    heads: Tensor,  # (segments,) int64
    segments: int,
    source: Tensor,  # (*, H), unit stride on H
    out: Tensor | None,  # (segments, H), unit stride on H
    out_bias: Tensor | None,  # (segments,)
    *,
    add: bool,
    fill: bool,
) -> None:
    """out[v] (+)= the sum over segment v's positions k, in order, of gradient[entries[k]] source[source_rows[k]].

    out_bias[v] (+)= the sum of gradient[entries[k]]. Segments without a position become zeros with `fill`; without,
    they are left as they are.
    """
    nnz, hidden_size = ids.numel(), source.shape[1]
    if nnz == 0:
        for tensor in (out, out_bias) if fill else ():
            if tensor is not None:
                tensor.zero_()
        return
    slots = triton.cdiv(nnz, PIECE)
    partials = bias_partials = None
    vec = 1
    if out is not None:
        partials = torch.empty(slots, hidden_size, dtype=torch.float32, device=ids.device)
        vec = vector(source, out)
    if out_bias is not None:
        bias_partials = torch.empty(slots, dtype=torch.float32, device=ids.device)
    stride_out = 0 if out is None else out.stride(0)
    width = 1 if out is None else hidden_size
    with on_device(ids):
        segment_sums_kernel[(triton.cdiv(nnz, GROUP), triton.cdiv(width, chunk(vec)))](
            gradient,
            entries,
            source_rows,
            ids,
            heads,
            None if out is None else source,
            out,
            out_bias,
            partials,
            bias_partials,
            nnz,
            segments,
            hidden_size,
            source.stride(0),
            stride_out,
            **constants(vec, add),
            **sums_options(source.element_size()),
        )
        programs = slots + (triton.cdiv(segments, EMPTY_ROWS) if fill else 0)
        add_pieces_kernel[(programs, triton.cdiv(width, PIECES_CHUNK))](
            ids,
            heads,
            out,
            out_bias,
            partials,
            bias_partials,
            nnz,
            slots,
            segments,
            hidden_size,
            stride_out,
            **pieces_constants(vec, add),
            **launch_options(),
        )


def support_weight(
    gradient: Tensor,  # (nnz,) float32
    hidden: Tensor,  # (N, H), unit stride on H
    by_token: ByToken,
    out: Tensor | None,  # (V, H), unit stride on H
    out_bias: Tensor | None,  # (V,)
    add: bool,
) -> None:
    """See `fastrl.backend.contract`."""
    check_unit_strides(hidden=hidden, out=out, out_bias=out_bias)
    ids, entries, rows, heads = by_token
    target = out_bias if out is None else out
    if target is None:
        return
    vocab = target.shape[0]
    heads = _heads(ids, None, None, vocab)[0] if heads is None else heads
    segment_sums(gradient, entries, rows, ids, heads, vocab, hidden, out, out_bias, add=add, fill=not add)


def _heads(ids: Tensor, entries: Tensor | None, rows: Tensor | None, vocab: int) -> tuple[Tensor, Tensor | None]:
    """The first position of each token, and rows[entries]; `ids` (nnz,) ascend."""
    nnz = ids.numel()
    heads = torch.empty(vocab, dtype=torch.int64, device=ids.device)
    sorted_rows = None if rows is None else torch.empty_like(rows)
    if nnz:
        with on_device(ids):
            heads_kernel[(triton.cdiv(max(vocab, nnz), HEADS_BLOCK),)](
                ids,
                entries,
                rows,
                heads,
                sorted_rows,
                nnz,
                vocab,
                nnz.bit_length(),
                BLOCK=HEADS_BLOCK,
                **launch_options(),
            )
    return heads, sorted_rows


def by_token(support: Support, vocab: int) -> ByToken:
    """See `fastrl.backend.contract`."""
    keys = torch.empty_like(support.token_ids)
    rows = entry_rows(support, keys, vocab)
    ids, entries = keys.sort(stable=True)
    heads, sorted_rows = _heads(ids, entries, rows, vocab)
    assert sorted_rows is not None
    return ByToken(ids, entries, sorted_rows, heads)
