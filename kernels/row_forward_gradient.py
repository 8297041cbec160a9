"""Forward-gradient: logits -> statistics -> a row-local objective -> gradient, in place of the logits or beside them.

A program owns a row and sweeps it twice: forward for the statistics, backward for the gradient, so that the second
sweep starts with the entries that the first left in L2. The gradient may go to a separate buffer. Between the sweeps
runs the objective, on the row's scalars; it is passed in as a device function, because the kernel knows no objective.
The result is bitwise that of `row_statistics`, the objective and `row_gradient`, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import LossTerms, Transform
from fastrl.kernels.configuration import (
    configuration,
    is_aligned,
    launch_options,
    numbers,
    on_device,
    row_distance,
    row_strides,
)
from fastrl.kernels.device_functions import (
    LOG2E,
    LOWEST,
    by_segment,
    capped,
    finish,
    fold,
    gradient_scalars,
    gradient_step,
    is_column,
    load_logit,
    load_target,
    load_vectors,
    row_pointer,
    scales,
    store_row_terms,
    store_zeros,
    update,
    vectors_in_turn,
)
from fastrl.objectives.rows import RowInputs


@triton.jit(
    do_not_specialize=["rows", "columns_b", "vocab", "stride_a", "stride_b", "gradient_stride"],
    do_not_specialize_on_alignment=[
        "logits_ptr",
        "gradient_ptr",
        "targets_ptr",
        "mask_ptr",
        "temperatures_ptr",
        "advantages_ptr",
        "policy_weights_ptr",
        "old_ptr",
        "ref_ptr",
        "rollout_ptr",
        "kl_weights_ptr",
        "entropy_weights_ptr",
        "entropy_threshold_ptr",
        "out_ptr",
    ],
)
def row_forward_gradient_kernel(
    logits_ptr,  # (A, B, V), unit stride on V
    gradient_ptr,  # (N, V), unit stride on V, maybe narrower; or None: the logits become the gradient
    targets_ptr,  # (N,) int64, N = A * B
    mask_ptr,  # (N,) uint8, or None
    temperatures_ptr,  # (N,) float32, or None
    advantages_ptr,  # (N,) float32
    policy_weights_ptr,  # (N,) float32
    old_ptr,  # (N,) float32, or None: the row's own logprob
    ref_ptr,  # (N,) float32, or None: the row's own logprob
    rollout_ptr,  # (N,) float32, or None: old
    kl_weights_ptr,  # (N,) float32, or None: 0
    entropy_weights_ptr,  # (N,) float32, or None: 0
    entropy_threshold_ptr,  # () float32, or None: no threshold
    out_ptr,  # (2 + 8, N) float32: logprobs, entropy, the objective's terms
    rows: tl.int32,  # N
    columns_b: tl.int32,  # B
    vocab: tl.int32,  # V
    stride_a: tl.int64,
    stride_b: tl.int64,
    gradient_stride: tl.int64,
    temperature: tl.float32,
    logit_scale: tl.float32,
    softcap: tl.float32,
    p0: tl.float32,  # p0 ... max_log_ratio: the objective's parameters
    p1: tl.float32,
    p2: tl.float32,
    p3: tl.float32,
    rollout_low: tl.float32,
    rollout_high: tl.float32,
    reject_low: tl.float32,
    reject_high: tl.float32,
    max_log_ratio: tl.float32,
    OBJECTIVE: tl.constexpr,  # device function: scalars -> eight terms, c = dL/dlogp, h = dL/dH
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (row,)."""
    STEP: tl.constexpr = BLOCK * SEGMENTS
    R: tl.constexpr = STEP // VEC
    ENTROPY: tl.constexpr = entropy_weights_ptr is not None
    row = tl.program_id(0)
    stride_out = rows.to(tl.int64)
    row_ptr = row_pointer(logits_ptr, row, columns_b, stride_a, stride_b, ALIGNED)
    to_ptr = row_ptr
    if gradient_ptr is not None:
        to_ptr = row_pointer(gradient_ptr, row, 1, gradient_stride, 0, ALIGNED)

    if mask_ptr is not None:  # noqa: SIM102  (at compile time; the next at run time)
        if tl.load(mask_ptr + row) == 0:
            for i in tl.static_range(10):
                tl.store(out_ptr + i * stride_out + row, 0.0)
            store_zeros(to_ptr, 0, vocab, R, VEC, ALIGNED)
            return

    # Load: the row's scalars.
    outer, inner2, slope = scales(row, temperature, temperatures_ptr, logit_scale, softcap, SOFTCAP)
    outer2 = outer * LOG2E
    column = load_target(targets_ptr + row, vocab)
    # Before the fold, whose barriers all warps pass: later, a faster warp may have written the gradient there.
    at_target = capped(load_logit(row_ptr, column), inner2, SOFTCAP)

    # Loop, forward: all segments at once.
    whole = (vocab // STEP) * STEP
    m = tl.full([R], LOWEST, tl.float32)
    s = tl.zeros([R], tl.float32)
    w = tl.zeros([R], tl.float32)
    vectors = vectors_in_turn(R, SEGMENTS)
    for start in tl.range(0, whole, STEP, num_stages=STAGES):
        x = load_vectors(row_ptr, start, vocab, vectors, VEC, ALIGNED, False, "evict_last")
        if (column >= start) & (column < start + STEP):
            x = tl.where(is_column(start, column, vectors, VEC), -float("inf"), x)
        m, s, w = update(m, s, w, capped(x, inner2, SOFTCAP), outer2)
    if whole < vocab:
        x = load_vectors(row_ptr, whole, vocab, vectors, VEC, ALIGNED, True, "evict_last")
        x = tl.where(is_column(whole, column, vectors, VEC), -float("inf"), x)
        m, s, w = update(m, s, w, capped(x, inner2, SOFTCAP), outer2)
    m_1, s_1, w_1 = fold(by_segment(m, SEGMENTS), by_segment(s, SEGMENTS), by_segment(w, SEGMENTS), outer2, 1)
    m_all, s_all, w_all = fold(m_1, s_1, w_1, outer2, 0)
    logprob, entropy, maximum, log_sum = finish(m_all, s_all, w_all, at_target, column >= 0, outer)

    # The objective.
    c, h = store_row_terms(
        row,
        logprob,
        entropy,
        advantages_ptr,
        policy_weights_ptr,
        old_ptr,
        ref_ptr,
        rollout_ptr,
        kl_weights_ptr,
        entropy_weights_ptr,
        entropy_threshold_ptr,
        p0,
        p1,
        p2,
        p3,
        rollout_low,
        rollout_high,
        reject_low,
        reject_high,
        max_log_ratio,
        out_ptr,
        out_ptr + stride_out,
        out_ptr + 2 * stride_out,
        stride_out,
        OBJECTIVE,
    )

    # An idle row's gradient is 0, so it needs no second sweep.
    idle = (column >= 0) & (c == 0.0) & (log_sum == log_sum)
    if ENTROPY:
        idle = idle & (h == 0.0)
    if idle:
        store_zeros(to_ptr, 0, vocab, R, VEC, ALIGNED)
        return

    # Loop, backward: the gradient. Without a pipeline it needs more registers: half as many entries at a time.
    BACK: tl.constexpr = STEP if ALIGNED and not SOFTCAP else STEP // 2
    a, b, shift2, at_column = gradient_scalars(logprob, entropy, log_sum, c, h if ENTROPY else None, slope)
    whole = (vocab // BACK) * BACK
    if whole < vocab:
        gradient_step(
            row_ptr,
            to_ptr,
            whole,
            vocab,
            column,
            maximum,
            a,
            b,
            shift2,
            at_column,
            outer,
            inner2,
            SOFTCAP,
            ENTROPY,
            BACK // VEC,
            VEC,
            ALIGNED,
            True,
            "evict_first",
        )
    for done in tl.range(0, whole, BACK, num_stages=STAGES):
        gradient_step(
            row_ptr,
            to_ptr,
            whole - BACK - done,
            vocab,
            column,
            maximum,
            a,
            b,
            shift2,
            at_column,
            outer,
            inner2,
            SOFTCAP,
            ENTROPY,
            BACK // VEC,
            VEC,
            ALIGNED,
            False,
            "evict_first",
        )


def row_forward_gradient(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    objective: Any,  # device function
    parameters: tuple[float, ...],  # p0..p3, rollout_low, rollout_high, reject_low, reject_high, max_log_ratio
    inputs: RowInputs,
    gradient: Tensor | None,  # (A, B, V), rows equally far apart, maybe narrower; or None: over the logits
) -> LossTerms:
    """See `fastrl.backend.contract`; the objective is in the form of `fastrl.backend.triton.formulas`."""
    rows, vocab = targets.numel(), logits.shape[-1]
    out = torch.empty(10, rows, dtype=torch.float32, device=logits.device)
    result = LossTerms(out[0], out[1], out[2:])
    if rows == 0:
        return result
    columns_b, stride_a, stride_b = row_strides(logits)
    sizes = configuration(vocab, logits.element_size())
    aligned = is_aligned(logits, sizes.vector) and (
        gradient is None or is_aligned(gradient, 16 // gradient.element_size())
    )
    with on_device(logits):
        row_forward_gradient_kernel[(rows,)](
            logits,
            gradient,
            targets,
            None if mask is None else mask.view(torch.uint8),
            transform.temperatures,
            *inputs,
            out,
            rows,
            columns_b,
            vocab,
            stride_a,
            stride_b,
            0 if gradient is None else row_distance(gradient),
            *numbers(transform),
            *map(float, parameters),
            OBJECTIVE=objective,
            SOFTCAP=transform.softcap != 0,
            ALIGNED=aligned,
            VEC=sizes.vector,
            BLOCK=sizes.block,
            SEGMENTS=sizes.segments,
            STAGES=sizes.stages if aligned and not transform.softcap else 1,
            **launch_options(sizes.forward_gradient_warps),
        )
    return result
