"""Forward-gradient: logits -> statistics -> a row-local objective -> gradient, in place of the logits or beside them.

A program owns a row and sweeps it twice: forward for the statistics, backward for the gradient, so that the second
sweep starts with the entries that the first left in L2. The gradient may go to a separate buffer. Between the sweeps
runs the objective, on the row's scalars; it is passed in as a device function, because the kernel knows no objective.
The result is bitwise that of `row_statistics`, the objective and `row_gradient`, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
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
    add_block,
    by_segment,
    capped,
    empty_sums,
    finish,
    fold,
    gradient_scalars,
    gradient_step,
    is_idle,
    load_logit,
    load_target,
    row_pointer,
    scales,
    store_row_terms,
    store_zeros,
    vectors_in_turn,
)
from fastrl.kernels.jit import kernel
from fastrl.objectives.rows import RowInputs


@kernel()
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
    transform,  # temperature, logit_scale, softcap
    objective_numbers,  # fastrl.objectives.rows.Numbers
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
    # One tuple from here on: as the kernel's argument, each address would be specialised on (jit.py).
    inputs = (
        advantages_ptr,
        policy_weights_ptr,
        old_ptr,
        ref_ptr,
        rollout_ptr,
        kl_weights_ptr,
        entropy_weights_ptr,
        entropy_threshold_ptr,
    )
    row_ptr = row_pointer(logits_ptr, row, columns_b, stride_a, stride_b, ALIGNED)
    to_ptr = row_ptr
    if gradient_ptr is not None:
        to_ptr = row_pointer(gradient_ptr, row, 1, gradient_stride, 0, ALIGNED)

    if mask_ptr is not None:  # noqa: SIM102  (at compile time; the next at run time)
        if tl.load(mask_ptr + row) == 0:
            for i in tl.static_range(10):
                tl.store(out_ptr + i * rows.to(tl.int64) + row, 0.0)
            store_zeros(to_ptr, 0, vocab, R, VEC, ALIGNED)
            return

    # Load: the row's scalars.
    scaling = scales(row, transform, temperatures_ptr, SOFTCAP)
    outer, inner2, slope = scaling
    column = load_target(targets_ptr + row, vocab)
    # Before the fold, whose barriers all warps pass: later, a faster warp may have written the gradient there.
    at_target = capped(load_logit(row_ptr, column), inner2, SOFTCAP)

    # Loop, forward: all segments at once.
    whole = (vocab // STEP) * STEP
    sums = empty_sums(R)
    vectors = vectors_in_turn(R, SEGMENTS)
    for start in tl.range(0, whole, STEP, num_stages=STAGES):
        sums = add_block(
            sums, row_ptr, start, vocab, column, vectors, scaling, SOFTCAP, VEC, ALIGNED, False, "evict_last"
        )
    if whole < vocab:
        sums = add_block(
            sums, row_ptr, whole, vocab, column, vectors, scaling, SOFTCAP, VEC, ALIGNED, True, "evict_last"
        )
    m, s, w = sums
    outer2 = outer * LOG2E
    m_1, s_1, w_1 = fold(by_segment(m, SEGMENTS), by_segment(s, SEGMENTS), by_segment(w, SEGMENTS), outer2, 1)
    m_all, s_all, w_all = fold(m_1, s_1, w_1, outer2, 0)
    statistics = finish(m_all, s_all, w_all, at_target, column >= 0, outer)

    # The objective.
    c, h = store_row_terms(row, statistics, inputs, objective_numbers, out_ptr, rows, OBJECTIVE)

    # An idle row needs no second sweep.
    h = h if ENTROPY else None
    if is_idle(statistics, c, h):
        store_zeros(to_ptr, 0, vocab, R, VEC, ALIGNED)
        return

    # Loop, backward: the gradient. Without a pipeline it needs more registers: half as many entries at a time.
    BACK: tl.constexpr = STEP if ALIGNED and not SOFTCAP else STEP // 2
    N: tl.constexpr = BACK // VEC
    scalars = gradient_scalars(statistics, c, h, slope)
    whole = (vocab // BACK) * BACK
    if whole < vocab:
        gradient_step(row_ptr, to_ptr, whole, vocab, column, scalars, scaling, SOFTCAP, ENTROPY, N, VEC, ALIGNED, True)
    for done in tl.range(0, whole, BACK, num_stages=STAGES):
        start = whole - BACK - done
        gradient_step(row_ptr, to_ptr, start, vocab, column, scalars, scaling, SOFTCAP, ENTROPY, N, VEC, ALIGNED, False)


def row_forward_gradient(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    objective: Any,  # device function
    objective_numbers: tuple[float, ...],
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
            numbers(transform),
            tuple(map(float, objective_numbers)),  # an integer would be a constant of the compilation
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
