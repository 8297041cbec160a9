"""Row gradient: (logits, statistics, c = dL/dlogp, h = dL/dH) -> dL/dlogits; each row is read once and written once.

    g_j = dz_j/dx_j * ( c (1[j = y] - p_j) - h p_j (log p_j + H) ),    p_j = exp(z_j - maximum - log_sum)

This is elementwise, so a row may be split into spans and the output may be the input. The target's entry comes from its
log-probability, 1 - p_y = -expm1(logp), because p_y may have been rounded to 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import Statistics, Transform
from fastrl.kernels.configuration import (
    configuration,
    is_aligned,
    launch_options,
    numbers,
    on_device,
    registers,
    row_strides,
)
from fastrl.kernels.device_functions import (
    gradient_scalars,
    gradient_step,
    is_idle,
    load_target,
    row_pointer,
    scales,
    store_zeros,
)
from fastrl.kernels.jit import kernel

_BLOCKS_A_PROGRAM = 16  # enough to pay for a program's start, few enough to split a long row in a small batch


@kernel()
def row_gradient_kernel(
    logits_ptr,  # (A, B, V), unit stride on V
    out_ptr,  # (A, B, V), unit stride on V; may be logits_ptr, or narrower
    targets_ptr,  # (N,) int64, N = A * B
    mask_ptr,  # (N,) uint8, or None
    temperatures_ptr,  # (N,) float32, or None
    logprobs_ptr,  # (N,) float32, the statistics
    entropy_ptr,  # (N,) float32
    maximum_ptr,  # (N,) float32
    log_sum_ptr,  # (N,) float32
    c_ptr,  # (N,) float32
    h_ptr,  # (N,) float32, or None: no entropy term
    columns_b: tl.int32,  # B
    vocab: tl.int32,  # V
    stride_a: tl.int64,
    stride_b: tl.int64,
    out_stride_a: tl.int64,
    out_stride_b: tl.int64,
    transform,  # temperature, logit_scale, softcap
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (row, span): BLOCK * BLOCKS columns of the row."""
    # Without a pipeline it needs more registers: half as many entries at a time.
    STEP: tl.constexpr = BLOCK if ALIGNED and not SOFTCAP else BLOCK // 2
    R: tl.constexpr = STEP // VEC
    ENTROPY: tl.constexpr = h_ptr is not None
    row = tl.program_id(0)
    # From here on, the program's span of the row is treated as the row.
    first = tl.program_id(1) * (BLOCK * BLOCKS)
    row_ptr = row_pointer(logits_ptr, row, columns_b, stride_a, stride_b, ALIGNED) + first
    out_row_ptr = row_pointer(out_ptr, row, columns_b, out_stride_a, out_stride_b, ALIGNED) + first
    span = tl.minimum(vocab - first, BLOCK * BLOCKS)

    if mask_ptr is not None:  # noqa: SIM102  (at compile time; the next at run time)
        if tl.load(mask_ptr + row) == 0:
            store_zeros(out_row_ptr, 0, span, R, VEC, ALIGNED)
            return

    # Load: the row's scalars.
    column = load_target(targets_ptr + row, vocab) - first  # outside every span if the target is not in the row
    statistics = (
        tl.load(logprobs_ptr + row),
        tl.load(entropy_ptr + row),
        tl.load(maximum_ptr + row),
        tl.load(log_sum_ptr + row),
    )
    c = tl.load(c_ptr + row)
    h = None
    if h_ptr is not None:
        h = tl.load(h_ptr + row)
    if is_idle(statistics, c, h):
        store_zeros(out_row_ptr, 0, span, R, VEC, ALIGNED)
        return

    scaling = scales(row, transform, temperatures_ptr, SOFTCAP)
    _, _, slope = scaling
    scalars = gradient_scalars(statistics, c, h, slope)

    # Loop: whole blocks, then the tail of the row.
    whole = (span // STEP) * STEP
    for start in tl.range(0, whole, STEP, num_stages=STAGES):
        gradient_step(
            row_ptr, out_row_ptr, start, span, column, scalars, scaling, SOFTCAP, ENTROPY, R, VEC, ALIGNED, False
        )
    if whole < span:
        gradient_step(
            row_ptr, out_row_ptr, whole, span, column, scalars, scaling, SOFTCAP, ENTROPY, R, VEC, ALIGNED, True
        )


def row_gradient(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    statistics: Statistics,
    c: Tensor,  # (N,) float32
    h: Tensor | None,  # (N,) float32
    out: Tensor,  # (A, B, V), may be logits; may be narrower than float32 logits
) -> None:
    """See `fastrl.backend.contract`; `out` may be `logits`."""
    rows, vocab = targets.numel(), logits.shape[-1]
    if rows == 0:
        return
    columns_b, stride_a, stride_b = row_strides(logits)
    _, out_stride_a, out_stride_b = row_strides(out)
    sizes = configuration(vocab, logits.element_size())
    aligned = is_aligned(logits, sizes.vector) and is_aligned(out, 16 // out.element_size())
    light = aligned and not transform.softcap
    with on_device(logits):
        row_gradient_kernel[(rows, triton.cdiv(vocab, sizes.block * _BLOCKS_A_PROGRAM))](
            logits,
            out,
            targets,
            None if mask is None else mask.view(torch.uint8),
            transform.temperatures,
            *statistics,
            c,
            h,
            columns_b,
            vocab,
            stride_a,
            stride_b,
            out_stride_a,
            out_stride_b,
            numbers(transform),
            SOFTCAP=transform.softcap != 0,
            ALIGNED=aligned,
            VEC=sizes.vector,
            BLOCK=sizes.block,
            BLOCKS=_BLOCKS_A_PROGRAM,
            STAGES=sizes.stages if light else 1,
            **launch_options(sizes.warps, registers(logits.element_size(), light)),
        )
