"""Combine splits: the statistics of a row from those of the splits of its vocabulary, folded in the splits' order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import Transform
from fastrl.kernels.configuration import numbers, on_device
from fastrl.kernels.device_functions import LOG2E, LOWEST, empty_sums, finish, fold, load_target, scales, store_each
from fastrl.kernels.jit import kernel

ROWS = 32  # per program: 128 bytes of each split
SPLITS = 32  # per step
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


@kernel()
def combine_splits_kernel(
    partials_ptr,  # (3, S, N) float32
    target_logits_ptr,  # (N,) float32
    targets_ptr,  # (N,) int64
    mask_ptr,  # (N,) uint8, or None; a masked row is not read
    temperatures_ptr,  # (N,) float32, or None
    out_ptr,  # (4, N) float32: logprobs, entropy, maximum, log_sum
    rows: tl.int32,  # N
    vocab: tl.int32,  # V
    splits: tl.int32,  # S
    transform,  # temperature, logit_scale, softcap
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (row block,)."""
    # Load: the rows' scalars; rows past the last one repeat it.
    first_row = tl.program_id(0) * ROWS
    row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1)
    outer, _, _ = scales(row, transform, temperatures_ptr, SOFTCAP)
    outer = tl.zeros([ROWS], tl.float32) + outer
    outer2 = outer * LOG2E
    # Nothing was written for masked rows: their memory holds anything.
    unmasked = row >= 0
    if mask_ptr is not None:
        unmasked = tl.load(mask_ptr + row) != 0
    valid = load_target(targets_ptr + row, vocab) >= 0
    at_target = tl.load(target_logits_ptr + row, mask=valid & unmasked, other=-float("inf"))

    # Loop: SPLITS splits at a time; each step's fold is folded with the previous result.
    m, s, w = empty_sums(ROWS)
    size = splits.to(tl.int64) * rows
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        pointers = partials_ptr + split.to(tl.int64)[:, None] * rows + row[None, :]
        mask = (split < splits)[:, None] & unmasked[None, :]
        m_1, s_1, w_1 = fold(
            tl.load(pointers, mask=mask, other=LOWEST),
            tl.load(pointers + size, mask=mask, other=0.0),
            tl.load(pointers + 2 * size, mask=mask, other=0.0),
            outer2[None, :],
            0,
        )
        m, s, w = fold(tl.join(m, m_1), tl.join(s, s_1), tl.join(w, w_1), outer2[:, None], 1)

    # Epilogue.
    logprob, entropy, maximum, log_sum = finish(m, s, w, at_target, valid, outer)
    if mask_ptr is not None:
        logprob = tl.where(unmasked, logprob, 0.0)
        entropy = tl.where(unmasked, entropy, 0.0)
        maximum = tl.where(unmasked, maximum, 0.0)
        log_sum = tl.where(unmasked, log_sum, 0.0)

    # Store.
    row = first_row + tl.arange(0, ROWS)
    store_each(out_ptr + row, rows.to(tl.int64), (logprob, entropy, maximum, log_sum), row < rows)


def combine_splits(
    partials: Tensor,  # (3, S, N) float32
    target_logits: Tensor,  # (N,) float32
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool; a masked row gives 0
    vocab: int,
    transform: Transform,
) -> Tensor:
    """Logprobs, entropy, maximum and log_sum of the N rows, (4, N) float32; the kernel documents its inputs."""
    _, splits, rows = partials.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=partials.device)
    with on_device(partials):
        combine_splits_kernel[(triton.cdiv(rows, ROWS),)](
            partials,
            target_logits,
            targets,
            None if mask is None else mask.view(torch.uint8),
            transform.temperatures,
            out,
            rows,
            vocab,
            splits,
            numbers(transform),
            SOFTCAP=transform.softcap != 0,
            ROWS=ROWS,
            SPLITS=SPLITS,
            **OPTIONS,
        )
    return out
