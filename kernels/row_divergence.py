"""Divergences between two logits of each row, the student's and the teacher's, and the gradient for the student.

A program owns a row of both. A first sweep finds the maxima, the sums of exponentials and, for a KL, the divergence in
the same online sums; the JSD needs the normalisers first, so it has a sweep of its own. The last sweep writes the
gradient; each sweep but the first starts where the one before ended, with the entries that are still in L2. Given the
statistics, the gradient is elementwise: then a row is split into spans.

Without what L2 saves, a bfloat16 pair of entries moves 4 bytes per sweep and 2 for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.backend.contract import Pair, PairStatistics
from fastrl.kernels.configuration import _WARP, configuration, is_aligned, launch_options, numbers, on_device
from fastrl.kernels.device_functions import (
    LN2,
    LOG2E,
    empty_sums,
    maximum,
    row_pointer,
    scales,
    store_each,
    store_zeros,
)
from fastrl.kernels.jit import kernel
from fastrl.kernels.pair_functions import (
    FORWARD_KL,
    JSD,
    REVERSE_KL,
    exact_sum,
    finish_side,
    fold_pair,
    mixture_step,
    pair_gradient_step,
    pair_statistics_step,
)

_KINDS = {"forward_kl": FORWARD_KL.value, "reverse_kl": REVERSE_KL.value, "jsd": JSD.value}
_STEPS_A_PROGRAM = 8  # of the elementwise gradient: enough to pay for a program's start, few enough to split a row


@kernel()
def row_divergence_kernel(
    logits_ptr,  # (N, V) contiguous
    teacher_ptr,  # (N, V) contiguous
    out_ptr,  # (N, V) contiguous, may be logits_ptr; None: no gradient
    temperatures_ptr,  # (N,) float32, or None
    teacher_temperatures_ptr,  # (N,) float32, or None
    c_ptr,  # (N,) float32; None: no gradient
    statistics_ptr,  # (6, N) float32, in the order of PairStatistics: written if STATISTICS, else read
    rows: tl.int32,  # N
    vocab: tl.int32,  # V
    transform,  # temperature, logit_scale, softcap
    teacher_transform,
    beta: tl.float32,
    KIND: tl.constexpr,
    STATISTICS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    VEC: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,  # of a program without STATISTICS
    BACK: tl.constexpr,  # columns per step of the gradient
    STAGES: tl.constexpr,
):
    """Program (row,); without STATISTICS (row, span), a span being STEP * STEPS columns."""
    R: tl.constexpr = STEP // VEC
    row = tl.program_id(0)
    row_ptr = row_pointer(logits_ptr, row, 1, vocab, 0, ALIGNED)
    teacher_row_ptr = row_pointer(teacher_ptr, row, 1, vocab, 0, ALIGNED)
    stride = rows.to(tl.int64)
    statistics_ptr += row
    scaling = scales(row, transform, temperatures_ptr, SOFTCAP)
    teacher_scaling = scales(row, teacher_transform, teacher_temperatures_ptr, TEACHER_SOFTCAP)
    outer, _, slope = scaling
    teacher_outer, _, _ = teacher_scaling

    if STATISTICS:
        first = 0
        span = vocab
        whole = (vocab // STEP) * STEP
        m, s, w = empty_sums(R)
        n, u, _ = empty_sums(R)
        sums = (m, s, n, u, w)
        for start in tl.range(0, whole, STEP, num_stages=STAGES):
            sums = pair_statistics_step(
                *(sums, row_ptr, teacher_row_ptr, start, vocab, scaling, teacher_scaling, KIND),
                *(SOFTCAP, TEACHER_SOFTCAP, R, VEC, ALIGNED, False),
            )
        if whole < vocab:
            sums = pair_statistics_step(
                *(sums, row_ptr, teacher_row_ptr, whole, vocab, scaling, teacher_scaling, KIND),
                *(SOFTCAP, TEACHER_SOFTCAP, R, VEC, ALIGNED, True),
            )
        m, s, n, u, w = sums
        top, total, teacher_top, teacher_total, cross = fold_pair(
            m, s, n, u, w, outer * LOG2E, teacher_outer * LOG2E, KIND
        )
        maximum_z, log_sum, exact_log_sum = finish_side(top, total, outer)
        teacher_maximum_z, teacher_log_sum, teacher_exact_log_sum = finish_side(
            teacher_top, teacher_total, teacher_outer
        )
        rest = exact_log_sum - teacher_exact_log_sum  # NaN if one of them is
        student_kl = 0.0
        if KIND == FORWARD_KL:
            divergence = cross / teacher_total * LN2 + rest
        elif KIND == REVERSE_KL:
            divergence = cross / total * LN2 - rest
        else:
            side = (scaling, maximum_z, -log_sum * LOG2E)
            teacher_side = (teacher_scaling, teacher_maximum_z, -teacher_log_sum * LOG2E)
            mixed = (tl.zeros([R], tl.float32), tl.zeros([R], tl.float32))
            if whole < vocab:
                mixed = mixture_step(
                    *(mixed, row_ptr, teacher_row_ptr, whole, vocab, side, teacher_side, beta),
                    *(SOFTCAP, TEACHER_SOFTCAP, R, VEC, ALIGNED, True),
                )
            for done in tl.range(0, whole, STEP, num_stages=STAGES):
                start = whole - STEP - done
                mixed = mixture_step(
                    *(mixed, row_ptr, teacher_row_ptr, start, vocab, side, teacher_side, beta),
                    *(SOFTCAP, TEACHER_SOFTCAP, R, VEC, ALIGNED, False),
                )
            student_kl = exact_sum(mixed[0])
            divergence = beta * exact_sum(mixed[1]) + (1.0 - beta) * student_kl
            divergence = tl.where(rest == rest, divergence, rest)
        divergence = maximum(divergence, 0.0)
        if KIND == REVERSE_KL:
            student_kl = divergence
        found = (divergence, student_kl, maximum_z, log_sum, teacher_maximum_z, teacher_log_sum)
        store_each(statistics_ptr, stride, found)
    else:
        # From here on, the program's span of the rows is treated as the rows.
        first = tl.program_id(1) * (STEP * STEPS)
        span = tl.minimum(vocab - first, STEP * STEPS)
        divergence = tl.load(statistics_ptr)
        student_kl = tl.load(statistics_ptr + stride)
        maximum_z = tl.load(statistics_ptr + 2 * stride)
        log_sum = tl.load(statistics_ptr + 3 * stride)
        teacher_maximum_z = tl.load(statistics_ptr + 4 * stride)
        teacher_log_sum = tl.load(statistics_ptr + 5 * stride)

    if c_ptr is not None:
        out_row_ptr = row_pointer(out_ptr, row, 1, vocab, 0, ALIGNED) + first
        c = tl.load(c_ptr + row)
        if c == 0.0:
            store_zeros(out_row_ptr, 0, span, R, VEC, ALIGNED)
            return
        factor = tl.where(divergence == divergence, c * slope, float("nan"))
        if KIND == REVERSE_KL:
            factor = tl.where(divergence < float("inf"), factor, float("nan"))
        elif KIND == JSD:
            factor = factor * (1.0 - beta)
        row_ptr += first
        teacher_row_ptr += first
        whole_span = (span // BACK) * BACK
        side = (scaling, maximum_z, -log_sum * LOG2E)
        teacher_side = (teacher_scaling, teacher_maximum_z, -teacher_log_sum * LOG2E)
        # After the JSD's sweep, which ends at the row's start, the tail comes last.
        FORWARD: tl.constexpr = STATISTICS and KIND == JSD
        if not FORWARD:  # noqa: SIM102  (at compile time; the next at run time)
            if whole_span < span:
                pair_gradient_step(
                    *(row_ptr, teacher_row_ptr, out_row_ptr, whole_span, span, side, teacher_side),
                    *(factor, student_kl, beta, KIND, SOFTCAP, TEACHER_SOFTCAP, BACK // VEC, VEC, ALIGNED, True),
                )
        for done in tl.range(0, whole_span, BACK, num_stages=STAGES):
            start = done if FORWARD else whole_span - BACK - done
            pair_gradient_step(
                *(row_ptr, teacher_row_ptr, out_row_ptr, start, span, side, teacher_side),
                *(factor, student_kl, beta, KIND, SOFTCAP, TEACHER_SOFTCAP, BACK // VEC, VEC, ALIGNED, False),
            )
        if FORWARD:  # noqa: SIM102
            if whole_span < span:
                pair_gradient_step(
                    *(row_ptr, teacher_row_ptr, out_row_ptr, whole_span, span, side, teacher_side),
                    *(factor, student_kl, beta, KIND, SOFTCAP, TEACHER_SOFTCAP, BACK // VEC, VEC, ALIGNED, True),
                )


def variant(
    vocab: int, itemsizes: tuple[int, int], light: bool, warp: int = _WARP
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's sizes, and the compiler's options; `light` means aligned rows and no softcap.

    A step is half the entries of `row_forward_gradient`'s, of each row: as many bytes are on their way, and as many
    numbers in registers. The wider type says how many steps fit the shared memory. Without a pipeline the gradient
    needs more registers, so that it takes half as many entries at a time; AMD has enough of them.
    """
    sizes = configuration(vocab, min(itemsizes), warp)
    step = max(32 * sizes.vector, sizes.block * sizes.segments // 2)
    back = step if light or warp != 32 else step // 2
    stages = configuration(vocab, max(itemsizes), warp).stages if light else 1
    constants = {"VEC": sizes.vector, "STEP": step, "STEPS": _STEPS_A_PROGRAM, "BACK": back, "STAGES": stages}
    return constants, launch_options(sizes.forward_gradient_warps, warp=warp)


def _launch(
    pair: Pair,
    statistics: Tensor,  # (6, N) float32
    c: Tensor | None,  # (N,) float32
    out: Tensor | None,  # (N, V)
    find: bool,  # the statistics; otherwise they are read
) -> None:
    logits, teacher_logits, transform, teacher_transform, divergence = pair
    rows, vocab = logits.shape
    named = {"logits": logits, "teacher_logits": teacher_logits, "out": out}
    tensors = {name: x for name, x in named.items() if x is not None}
    for name, x in tensors.items():
        if x.shape != logits.shape or not x.is_contiguous():
            got = f"shape {tuple(x.shape)}, strides {x.stride()}"
            raise ValueError(f"{name} must be contiguous {tuple(logits.shape)}, got {got}")
    if rows == 0:
        return
    itemsizes = logits.element_size(), teacher_logits.element_size()
    vector = configuration(vocab, min(itemsizes)).vector
    aligned = vocab % vector == 0 and all(is_aligned(x[None], 16 // x.element_size()) for x in tensors.values())
    light = aligned and not transform.softcap and not teacher_transform.softcap
    constants, options = variant(vocab, itemsizes, light)
    spans = 1 if find else triton.cdiv(vocab, constants["STEP"] * constants["STEPS"])
    with on_device(logits):
        row_divergence_kernel[(rows, spans)](
            logits,
            teacher_logits,
            out,
            transform.temperatures,
            teacher_transform.temperatures,
            c,
            statistics,
            rows,
            vocab,
            numbers(transform),
            numbers(teacher_transform),
            float(divergence.beta),
            KIND=_KINDS[divergence.kind],
            STATISTICS=find,
            SOFTCAP=transform.softcap != 0,
            TEACHER_SOFTCAP=teacher_transform.softcap != 0,
            ALIGNED=aligned,
            **constants,
            **options,
        )


def _forward(pair: Pair, c: Tensor | None, out: Tensor | None) -> PairStatistics:
    found = torch.empty(6, pair.logits.shape[0], dtype=torch.float32, device=pair.logits.device)
    _launch(pair, found, c, out, True)
    return PairStatistics(*found)


def pair_statistics(pair: Pair) -> PairStatistics:
    """See `fastrl.backend.contract`."""
    return _forward(pair, None, None)


def pair_gradient(pair: Pair, statistics: PairStatistics, c: Tensor, out: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    _launch(pair, torch.stack(statistics), c, out, False)


def pair_forward_gradient(pair: Pair, c: Tensor, out: Tensor | None = None) -> PairStatistics:
    """See `fastrl.backend.contract`."""
    return _forward(pair, c, pair.logits if out is None else out)
