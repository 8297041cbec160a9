"""Support forward-gradient: `row_forward_gradient` for rows of a few, adjacent logits, beside the logits or in place.

A program of one warp owns a row, as in `support_statistics`, whose sweeps these are: the results are bitwise those of
`support_statistics`, the objective and `support_gradient`, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import LossTerms, Support, Transform
from fastrl.kernels.configuration import numbers, on_device
from fastrl.kernels.device_functions import scales, store_row_terms
from fastrl.kernels.support_statistics import (
    BLOCK,
    OPTIONS,
    store_support_gradient,
    store_support_zeros,
    support_row_statistics,
)
from fastrl.objectives.rows import TERMS, RowInputs


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "values_ptr",
        "gradient_ptr",
        "targets_ptr",
        "token_ids_ptr",
        "offsets_ptr",
        "valid_ptr",
        "temperatures_ptr",
        "advantages_ptr",
        "policy_weights_ptr",
        "old_ptr",
        "ref_ptr",
        "rollout_ptr",
        "kl_weights_ptr",
        "entropy_weights_ptr",
        "entropy_threshold_ptr",
        "logprobs_ptr",
        "entropies_ptr",
        "terms_ptr",
    ],
)
def support_forward_gradient_kernel(
    values_ptr,  # (nnz,) float32
    gradient_ptr,  # (nnz,) float32; may be values_ptr
    targets_ptr,  # (N,) int64
    token_ids_ptr,  # (nnz,) int32
    offsets_ptr,  # (N + 1,) int64
    valid_ptr,  # (N,) uint8
    temperatures_ptr,  # (N,) float32, or None
    advantages_ptr,  # (N,) float32
    policy_weights_ptr,  # (N,) float32
    old_ptr,  # (N,) float32, or None: the row's own logprob
    ref_ptr,  # (N,) float32, or None: the row's own logprob
    rollout_ptr,  # (N,) float32, or None: old
    kl_weights_ptr,  # (N,) float32, or None: 0
    entropy_weights_ptr,  # (N,) float32, or None: 0
    entropy_threshold_ptr,  # () float32, or None: no threshold
    logprobs_ptr,  # (N,) float32, output
    entropies_ptr,  # (N,) float32, output
    terms_ptr,  # (8, N) float32, output: the objective's terms
    rows: tl.int32,  # N
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
    BLOCK: tl.constexpr,
):
    """Program (row,)."""
    ENTROPY: tl.constexpr = entropy_weights_ptr is not None
    row = tl.program_id(0)
    stride_out = rows.to(tl.int64)
    first = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + row + 1) - first).to(tl.int32)
    values_ptr += first
    gradient_ptr += first
    token_ids_ptr += first

    if (tl.load(valid_ptr + row) == 0) | (count == 0):
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(entropies_ptr + row, 0.0)
        for i in tl.static_range(8):
            tl.store(terms_ptr + i * stride_out + row, 0.0)
        store_support_zeros(gradient_ptr, count, BLOCK)
        return

    outer, inner2, slope = scales(row, temperature, temperatures_ptr, logit_scale, softcap, SOFTCAP)
    target = tl.load(targets_ptr + row)
    logprob, entropy, maximum, log_sum = support_row_statistics(
        values_ptr, token_ids_ptr, count, target, outer, inner2, SOFTCAP, BLOCK
    )
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
        logprobs_ptr,
        entropies_ptr,
        terms_ptr,
        stride_out,
        OBJECTIVE,
    )
    store_support_gradient(
        values_ptr,
        gradient_ptr,
        token_ids_ptr,
        count,
        target,
        logprob,
        entropy,
        maximum,
        log_sum,
        c,
        h if ENTROPY else None,
        outer,
        inner2,
        slope,
        SOFTCAP,
        BLOCK,
    )


def support_forward_gradient(
    values: Tensor,  # (nnz,) float32
    targets: Tensor,  # (N,) int64
    support: Support,
    transform: Transform,
    objective: Any,  # device function
    parameters: tuple[float, ...],  # p0..p3, rollout_low, rollout_high, reject_low, reject_high, max_log_ratio
    inputs: RowInputs,
    gradient: Tensor,  # (nnz,) float32, may be values
) -> LossTerms:
    """See `fastrl.backend.contract`; the objective is in the form of `fastrl.backend.triton.formulas`."""
    rows = targets.numel()
    shapes = ((rows,), (rows,), (len(TERMS), rows))
    result = LossTerms(*(torch.empty(shape, dtype=torch.float32, device=values.device) for shape in shapes))
    if rows == 0:
        return result
    with on_device(values):
        support_forward_gradient_kernel[(rows,)](
            values,
            gradient,
            targets,
            support.token_ids,
            support.offsets,
            support.valid.view(torch.uint8),
            transform.temperatures,
            *inputs,
            *result,
            rows,
            *numbers(transform),
            *map(float, parameters),
            OBJECTIVE=objective,
            SOFTCAP=transform.softcap != 0,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return result
