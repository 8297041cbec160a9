"""Row statistics: logits -> (log-probability of the target, entropy, maximum, log-sum); each row is read once.

A program owns a row. It walks the row in blocks of R vectors, with one running (maximum, sum, entropy sum) per vector
and thread, so that the loop has no reduction across threads and no shuffle; its barriers are those of the copies to
shared memory, if its loads are pipelined. These accumulators are folded once per segment. The sums leave out the
target: a confident token's log-probability needs the sum over the others.

If there are too few rows to fill the GPU, a program takes one segment of a row and passes its folded accumulators to
`combine_splits`. A fold is exact, so the result is bitwise the same.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import Statistics, Transform
from fastrl.kernels.combine_splits import combine_splits
from fastrl.kernels.configuration import (
    configuration,
    is_aligned,
    launch_options,
    multiprocessors,
    numbers,
    on_device,
    registers,
    row_strides,
)
from fastrl.kernels.device_functions import (
    LOG2E,
    add_block,
    capped,
    empty_sums,
    finish,
    fold,
    load_logit,
    load_target,
    row_pointer,
    scales,
    store_each,
)
from fastrl.kernels.jit import kernel

#: Programs of 4 warps with 96 registers per thread that fit on a multiprocessor. If there are fewer rows than programs
#: that fit on the GPU, each segment of a row gets its own program.
_PROGRAMS = 5


@kernel()
def row_statistics_kernel(
    logits_ptr,  # (A, B, V), unit stride on V
    targets_ptr,  # (N,) int64, N = A * B
    mask_ptr,  # (N,) uint8, or None
    temperatures_ptr,  # (N,) float32, or None
    out_ptr,  # (4, N) float32: logprobs, entropy, maximum, log_sum; with SPLIT (3, SEGMENTS, N): m, s, w
    target_logits_ptr,  # (N,) float32, with SPLIT: the targets' z / outer; else None
    rows: tl.int32,  # N
    columns_b: tl.int32,  # B
    vocab: tl.int32,  # V
    stride_a: tl.int64,
    stride_b: tl.int64,
    transform,  # temperature, logit_scale, softcap
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (row,), with SPLIT (row, segment)."""
    R: tl.constexpr = BLOCK // VEC
    STEP: tl.constexpr = BLOCK * SEGMENTS
    row = tl.program_id(0)
    out_ptr += row

    if mask_ptr is not None:  # noqa: SIM102  (at compile time; the next at run time)
        if tl.load(mask_ptr + row) == 0:
            if not SPLIT:
                for i in tl.static_range(4):
                    tl.store(out_ptr + i * rows.to(tl.int64), 0.0)
            return

    # Load: the row's scalars.
    row_ptr = row_pointer(logits_ptr, row, columns_b, stride_a, stride_b, ALIGNED)
    scaling = scales(row, transform, temperatures_ptr, SOFTCAP)
    outer, inner2, _ = scaling
    column = load_target(targets_ptr + row, vocab)

    # Loop: all segments one after the other, or only this program's.
    first, last = 0, SEGMENTS
    if SPLIT:
        first = tl.program_id(1)
        last = first + 1
    segment_index = tl.arange(0, SEGMENTS)
    segments_m, segments_s, segments_w = empty_sums(SEGMENTS)
    whole = (vocab // BLOCK) * BLOCK
    vectors = tl.arange(0, R)
    for segment in range(first, last):
        sums = empty_sums(R)
        for start in tl.range(segment * BLOCK, whole, STEP, num_stages=STAGES):
            sums = add_block(
                sums, row_ptr, start, vocab, column, vectors, scaling, SOFTCAP, VEC, ALIGNED, False, "evict_first"
            )
        # The segment's first incomplete block: the row's tail in one segment, past the row's end in the others.
        rest = segment * BLOCK + tl.cdiv(tl.maximum(whole - segment * BLOCK, 0), STEP) * STEP
        if rest < vocab:
            sums = add_block(
                sums, row_ptr, rest, vocab, column, vectors, scaling, SOFTCAP, VEC, ALIGNED, True, "evict_first"
            )
        m, s, w = sums
        m_1, s_1, w_1 = fold(m, s, w, outer * LOG2E, 0)
        segments_m = tl.where(segment_index == segment, m_1, segments_m)
        segments_s = tl.where(segment_index == segment, s_1, segments_s)
        segments_w = tl.where(segment_index == segment, w_1, segments_w)

    # Epilogue. The target's logit is read only now: kept during the loop it would cost a register, or a spill.
    at_target = capped(load_logit(row_ptr, column), inner2, SOFTCAP)

    # Store: this program's folded accumulators, or the row's statistics.
    if SPLIT:
        mine = segment_index == first
        out_ptr += segment_index.to(tl.int64) * rows
        store_each(out_ptr, SEGMENTS * rows.to(tl.int64), (segments_m, segments_s, segments_w), mine)
        if first == 0:
            tl.store(target_logits_ptr + row, at_target)
    else:
        m_all, s_all, w_all = fold(segments_m, segments_s, segments_w, outer * LOG2E, 0)
        store_each(out_ptr, rows.to(tl.int64), finish(m_all, s_all, w_all, at_target, column >= 0, outer))


def row_statistics(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
) -> Statistics:
    """See `fastrl.backend.contract`."""
    rows, vocab = targets.numel(), logits.shape[-1]
    if rows == 0:
        return Statistics(*torch.empty(4, 0, dtype=torch.float32, device=logits.device))
    columns_b, stride_a, stride_b = row_strides(logits)
    sizes = configuration(vocab, logits.element_size())
    aligned = is_aligned(logits, sizes.vector)
    light = aligned and not transform.softcap
    split = sizes.segments > 1 and rows < _PROGRAMS * multiprocessors(logits)
    shape = (3, sizes.segments, rows) if split else (4, rows)
    out = torch.empty(shape, dtype=torch.float32, device=logits.device)
    target_logits = torch.empty(rows, dtype=torch.float32, device=logits.device) if split else None
    with on_device(logits):
        row_statistics_kernel[(rows, sizes.segments if split else 1)](
            logits,
            targets,
            None if mask is None else mask.view(torch.uint8),
            transform.temperatures,
            out,
            target_logits,
            rows,
            columns_b,
            vocab,
            stride_a,
            stride_b,
            numbers(transform),
            SOFTCAP=transform.softcap != 0,
            ALIGNED=aligned,
            VEC=sizes.vector,
            BLOCK=sizes.block,
            SEGMENTS=sizes.segments,
            SPLIT=split,
            STAGES=sizes.stages if light else 1,
            **launch_options(sizes.warps, registers(logits.element_size(), light)),
        )
    if target_logits is not None:
        out = combine_splits(out, target_logits, targets, mask, vocab, transform)
    return Statistics(*out)
