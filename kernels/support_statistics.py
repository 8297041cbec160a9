"""Support statistics and their gradient: `row_statistics` and `row_gradient` for rows of a few, adjacent logits.

A program of one warp owns a row: most rows keep a handful of entries, all in one block. The target is found by its
token id and left out of the sums as in `row_statistics`, so a row that keeps only its target has a log-probability of
exactly 0. Blocks count from the row's first entry, so a row's results are bitwise the same in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import Statistics, Support, Transform
from fastrl.kernels.configuration import numbers, on_device
from fastrl.kernels.device_functions import (
    LOG2E,
    capped,
    empty_sums,
    finish,
    fold,
    gradient_block,
    gradient_scalars,
    is_idle,
    scales,
    store_each,
    update,
)
from fastrl.kernels.jit import kernel

BLOCK = 256  # entries per step: 8 per thread
OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True}


@triton.jit
def support_row_statistics(
    values_ptr, token_ids_ptr, count, target, scaling, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):
    """logprob, entropy, maximum and log_sum of a row of `count` logits."""
    outer, inner2, _ = scaling
    outer2 = outer * LOG2E
    # Loop: one accumulator per entry of a block.
    m, s, w = empty_sums(BLOCK)
    at_target = tl.zeros([BLOCK], tl.float32)
    hits = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        mask = entry < count
        x = tl.load(values_ptr + entry, mask=mask, other=-float("inf"))
        token = tl.load(token_ids_ptr + entry, mask=mask, other=0)
        hit = mask & (token.to(tl.int64) == target)  # in 64 bits: a target beyond 32 bits is no token
        x = capped(x, inner2, SOFTCAP)
        at_target += tl.where(hit, x, 0.0)  # a sum, because it keeps a NaN; the others are 0
        hits += hit.to(tl.int32)
        m, s, w = update(m, s, w, tl.where(hit, -float("inf"), x)[:, None], outer2)

    # Epilogue.
    has_target = tl.sum(hits, axis=0) > 0
    target_x = tl.where(has_target, tl.sum(at_target, axis=0), -float("inf"))
    m_all, s_all, w_all = fold(m, s, w, outer2, 0)
    return finish(m_all, s_all, w_all, target_x, has_target, outer)


@triton.jit
def store_support_zeros(out_ptr, count, BLOCK: tl.constexpr):
    """Zeros in `count` entries."""
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + entry, tl.zeros([BLOCK], tl.float32), mask=entry < count)


@triton.jit
def store_support_gradient(
    values_ptr,
    out_ptr,
    token_ids_ptr,
    count,
    target,
    statistics,
    c,
    h,  # or None: no entropy term
    scaling,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a row of `count` logits; zeros if the row is idle."""
    if is_idle(statistics, c, h):
        store_support_zeros(out_ptr, count, BLOCK)
    else:
        _, _, slope = scaling
        scalars = gradient_scalars(statistics, c, h, slope)
        # Loop: each entry is read before it is written, so out may be values.
        for start in range(0, count, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            mask = entry < count
            x = tl.load(values_ptr + entry, mask=mask, other=0.0)
            token = tl.load(token_ids_ptr + entry, mask=mask, other=0)
            g, at_target = gradient_block(x, scalars, scaling, SOFTCAP, h is not None)
            g = tl.where(token.to(tl.int64) == target, at_target, g)
            tl.store(out_ptr + entry, g, mask=mask)


@kernel()
def support_statistics_kernel(
    values_ptr,  # (nnz,) float32
    targets_ptr,  # (N,) int64
    token_ids_ptr,  # (nnz,) int32
    offsets_ptr,  # (N + 1,) int64
    valid_ptr,  # (N,) uint8
    temperatures_ptr,  # (N,) float32, or None
    out_ptr,  # (4, N) float32: logprobs, entropy, maximum, log_sum
    rows: tl.int32,  # N
    transform,  # temperature, logit_scale, softcap
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row,)."""
    row = tl.program_id(0)
    out_ptr += row
    first = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + row + 1) - first).to(tl.int32)

    if (tl.load(valid_ptr + row) == 0) | (count == 0):
        for i in tl.static_range(4):
            tl.store(out_ptr + i * rows.to(tl.int64), 0.0)
        return

    # Load: the row's scalars.
    target = tl.load(targets_ptr + row)
    scaling = scales(row, transform, temperatures_ptr, SOFTCAP)
    statistics = support_row_statistics(
        values_ptr + first, token_ids_ptr + first, count, target, scaling, SOFTCAP, BLOCK
    )
    store_each(out_ptr, rows.to(tl.int64), statistics)


def support_statistics(
    values: Tensor,  # (nnz,) float32
    targets: Tensor,  # (N,) int64
    support: Support,
    transform: Transform,
) -> Statistics:
    """See `fastrl.backend.contract`."""
    rows = targets.numel()
    out = torch.empty(4, rows, dtype=torch.float32, device=targets.device)
    if rows == 0:
        return Statistics(*out)
    with on_device(values):
        support_statistics_kernel[(rows,)](
            values,
            targets,
            support.token_ids,
            support.offsets,
            support.valid.view(torch.uint8),
            transform.temperatures,
            out,
            rows,
            numbers(transform),
            SOFTCAP=transform.softcap != 0,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return Statistics(*out)


@kernel()
def support_gradient_kernel(
    values_ptr,  # (nnz,) float32
    out_ptr,  # (nnz,) float32; may be values_ptr
    targets_ptr,  # (N,) int64
    token_ids_ptr,  # (nnz,) int32
    offsets_ptr,  # (N + 1,) int64
    valid_ptr,  # (N,) uint8
    temperatures_ptr,  # (N,) float32, or None
    logprobs_ptr,  # (N,) float32, the statistics
    entropy_ptr,  # (N,) float32
    maximum_ptr,  # (N,) float32
    log_sum_ptr,  # (N,) float32
    c_ptr,  # (N,) float32
    h_ptr,  # (N,) float32, or None: no entropy term
    transform,  # temperature, logit_scale, softcap
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row,)."""
    row = tl.program_id(0)
    first = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + row + 1) - first).to(tl.int32)
    values_ptr += first
    out_ptr += first

    if tl.load(valid_ptr + row) == 0:
        store_support_zeros(out_ptr, count, BLOCK)
        return

    # Load: the row's scalars.
    h = None
    if h_ptr is not None:
        h = tl.load(h_ptr + row)
    scaling = scales(row, transform, temperatures_ptr, SOFTCAP)
    statistics = (
        tl.load(logprobs_ptr + row),
        tl.load(entropy_ptr + row),
        tl.load(maximum_ptr + row),
        tl.load(log_sum_ptr + row),
    )
    c, target = tl.load(c_ptr + row), tl.load(targets_ptr + row)
    store_support_gradient(
        values_ptr, out_ptr, token_ids_ptr + first, count, target, statistics, c, h, scaling, SOFTCAP, BLOCK
    )


def support_gradient(
    values: Tensor,  # (nnz,) float32
    targets: Tensor,  # (N,) int64
    support: Support,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,  # (N,) float32
    h: Tensor | None,  # (N,) float32
    out: Tensor,  # (nnz,) float32, may be values
) -> None:
    """See `fastrl.backend.contract`; `out` may be `values`."""
    rows = targets.numel()
    if rows == 0 or values.numel() == 0:
        return
    with on_device(values):
        support_gradient_kernel[(rows,)](
            values,
            out,
            targets,
            support.token_ids,
            support.offsets,
            support.valid.view(torch.uint8),
            transform.temperatures,
            *statistics,
            c,
            h,
            numbers(transform),
            SOFTCAP=transform.softcap != 0,
            BLOCK=BLOCK,
            **OPTIONS,
        )
