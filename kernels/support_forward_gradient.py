"""Support forward-gradient: `row_forward_gradient` for rows of a few, adjacent logits, beside the logits or in place.

A program of one warp owns a row, as in `support_statistics`, whose sweeps these are: the results are bitwise those of
`support_statistics`, the objective and `support_gradient`, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import LossTerms, Support, Transform
from fastrl.kernels.configuration import numbers, on_device
from fastrl.kernels.device_functions import scales, store_row_terms
from fastrl.kernels.jit import kernel
from fastrl.kernels.support_statistics import (
    BLOCK,
    OPTIONS,
    store_support_gradient,
    store_support_zeros,
    support_row_statistics,
)
from fastrl.objectives.rows import RowInputs


@kernel()
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
    out_ptr,  # (2 + 8, N) float32: logprobs, entropy, the objective's terms
    rows: tl.int32,  # N
    transform,  # temperature, logit_scale, softcap
    objective_numbers,  # fastrl.objectives.rows.Numbers
    OBJECTIVE: tl.constexpr,  # device function: scalars -> eight terms, c = dL/dlogp, h = dL/dH
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row,)."""
    row = tl.program_id(0)
    first = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + row + 1) - first).to(tl.int32)
    values_ptr += first
    gradient_ptr += first
    token_ids_ptr += first

    if (tl.load(valid_ptr + row) == 0) | (count == 0):
        for i in tl.static_range(10):
            tl.store(out_ptr + i * rows.to(tl.int64) + row, 0.0)
        store_support_zeros(gradient_ptr, count, BLOCK)
        return

    scaling = scales(row, transform, temperatures_ptr, SOFTCAP)
    target = tl.load(targets_ptr + row)
    statistics = support_row_statistics(values_ptr, token_ids_ptr, count, target, scaling, SOFTCAP, BLOCK)
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
    c, h = store_row_terms(row, statistics, inputs, objective_numbers, out_ptr, rows, OBJECTIVE)
    if entropy_weights_ptr is None:
        h = None
    store_support_gradient(
        values_ptr, gradient_ptr, token_ids_ptr, count, target, statistics, c, h, scaling, SOFTCAP, BLOCK
    )


def support_forward_gradient(
    values: Tensor,  # (nnz,) float32
    targets: Tensor,  # (N,) int64
    support: Support,
    transform: Transform,
    objective: Any,  # device function
    objective_numbers: tuple[float, ...],
    inputs: RowInputs,
    gradient: Tensor,  # (nnz,) float32, may be values
) -> LossTerms:
    """See `fastrl.backend.contract`; the objective is in the form of `fastrl.backend.triton.formulas`."""
    rows = targets.numel()
    out = torch.empty(10, rows, dtype=torch.float32, device=values.device)
    result = LossTerms(out[0], out[1], out[2:])
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
            out,
            rows,
            numbers(transform),
            tuple(map(float, objective_numbers)),  # an integer would be a constant of the compilation
            OBJECTIVE=objective,
            SOFTCAP=transform.softcap != 0,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return result
