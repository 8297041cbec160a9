"""The arithmetic of `row_divergence`: sums over two rows at a time, the mixture of two distributions, the gradient.

The student's probabilities are p, the teacher's q. Shapes as in `device_functions`: a block of both rows is R vectors
of VEC consecutive columns each; `m` and `s` are the student's accumulators, `n` and `u` the teacher's, and `w` belongs
to both. Differences of logarithms are formed from `fma(a, b, 0)`: the compiler would join a product and the
subtraction into one operation, and equal rows would differ.
"""

import triton
import triton.language as tl

from fastrl.kernels.device_functions import (
    FIXED,
    LN2,
    LOG2E,
    capped,
    load_block,
    load_vectors,
    log,
    store_block,
    tanh_and_slope,
)

FORWARD_KL = tl.constexpr(0)
REVERSE_KL = tl.constexpr(1)
JSD = tl.constexpr(2)
_FAR = tl.constexpr(-1e30)  # lower bound of exponents that are multiplied by a sum: -inf * 0 would be NaN


@triton.jit
def _added(scale, shift, other_shift, s, w):
    """The cross accumulator w after its own maximum moved by `shift` and the other side's by `other_shift`."""
    return tl.where(scale * s > 0.0, scale * tl.fma(shift - other_shift, s, w), 0.0)


@triton.jit
def update_pair(m, s, n, u, w, x, y, outer2, teacher_outer2, KIND: tl.constexpr):
    """Add a block of both rows to the accumulators: m = max x, s = sum 2**d, n = max y, u = sum 2**e.

    d = outer2 (x - m), e = teacher_outer2 (y - n). w = sum 2**e (e - d), or sum 2**d (d - e) for the reverse KL; a
    term is 0 if its power of 2 is 0. m, s, n, u, w: (R,) float32; x, y: (R, VEC) float32, z / outer; outer2: outer *
    log2(e). A NaN in x or y makes s or u NaN.
    """
    top = tl.maximum(m, tl.max(x, axis=1))
    teacher_top = tl.maximum(n, tl.max(y, axis=1))
    d = tl.fma(x - top[:, None], outer2, 0.0)
    e = tl.fma(y - teacher_top[:, None], teacher_outer2, 0.0)
    p = tl.exp2(d)
    q = tl.exp2(e)
    shift = tl.maximum(tl.fma(m - top, outer2, 0.0), _FAR)
    teacher_shift = tl.maximum(tl.fma(n - teacher_top, teacher_outer2, 0.0), _FAR)
    scale = tl.exp2(shift)
    teacher_scale = tl.exp2(teacher_shift)
    if KIND == REVERSE_KL:
        w = _added(scale, shift, teacher_shift, s, w) + tl.sum(tl.where(p > 0.0, p * (d - e), 0.0), axis=1)
    elif KIND == FORWARD_KL:
        w = _added(teacher_scale, teacher_shift, shift, u, w) + tl.sum(tl.where(q > 0.0, q * (e - d), 0.0), axis=1)
    s = tl.fma(scale, s, tl.sum(p, axis=1))
    u = tl.fma(teacher_scale, u, tl.sum(q, axis=1))
    return top, s, teacher_top, u, w


@triton.jit
def exact_sum(x):
    """The sum of x (R,), which does not depend on the order: in fixed point, 2**-40 of the largest the unit."""
    bits = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True) & 0x7F800000
    power = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    total = tl.sum((x * inverse * FIXED).to(tl.int64), axis=0).to(tl.float32) * (1.0 / FIXED) * power
    return tl.where(power == float("inf"), power, total)


@triton.jit
def fold_pair(m, s, n, u, w, outer2, teacher_outer2, KIND: tl.constexpr):
    """Combine the accumulators into the row's, exactly: the result does not depend on the order or the layout.

    As in `device_functions.fold`; w is added up by `exact_sum`.
    """
    m = tl.where(s == s, m, float("inf"))
    n = tl.where(u == u, n, float("inf"))
    top = tl.max(m, axis=0)
    teacher_top = tl.max(n, axis=0)
    shift = tl.maximum(tl.fma(m - top, outer2, 0.0), _FAR)
    teacher_shift = tl.maximum(tl.fma(n - teacher_top, teacher_outer2, 0.0), _FAR)
    scale = tl.exp2(shift)
    teacher_scale = tl.exp2(teacher_shift)
    if KIND == REVERSE_KL:
        w = exact_sum(_added(scale, shift, teacher_shift, s, w))
    elif KIND == FORWARD_KL:
        w = exact_sum(_added(teacher_scale, teacher_shift, shift, u, w))
    else:
        w = 0.0
    pairs = (tl.join(scale * s, teacher_scale * u) * FIXED).to(tl.int64)
    s, u = tl.split(tl.sum(pairs, axis=0).to(tl.float32) * (1.0 / FIXED))
    s = tl.where(top == float("inf"), float("nan"), s)
    u = tl.where(teacher_top == float("inf"), float("nan"), u)
    return top, s, teacher_top, u, w


@triton.jit
def finish_side(top, total, outer):
    """A side's maximum, log_sum, which is relative to the rounded maximum, and log_sum relative to the exact one."""
    empty = total == 0.0  # every logit is -inf
    log_sum = tl.where(empty, float("nan"), log(total))
    maximum = top * outer
    rounded_off = tl.where(tl.abs(maximum) < float("inf"), tl.fma(top, outer, -maximum), 0.0)  # as in `finish`
    return tl.where(empty, -float("inf"), maximum), log_sum + rounded_off, log_sum


@triton.jit
def log2_p(x, side, SOFTCAP: tl.constexpr):
    """log2 of the probabilities of raw logits x, and the softcap's factor of dz/dx.

    A side is (scaling, maximum_z, shift2), with the row's `scales` and shift2 = -log_sum log2(e).
    """
    scaling, maximum_z, shift2 = side
    outer, inner2, _ = scaling
    factor = 1.0
    if SOFTCAP:
        t, factor = tanh_and_slope(x * inner2)
        x = tl.where(x == -float("inf"), x, t)
    return tl.fma(tl.fma(x, outer, -maximum_z), LOG2E, shift2), factor


@triton.jit
def mixture_log_ratios(log2_p, log2_q, beta):
    """log(p / m) and log(q / m), m = beta q + (1 - beta) p; exactly 0 where p = q, finite where p or q is 0."""
    d2 = log2_q - log2_p
    d2 = tl.where(d2 == d2, tl.minimum(tl.maximum(d2, _FAR), -_FAR), 0.0)
    ratio = tl.exp2(-tl.abs(d2))  # of the smaller one to the larger
    weight = tl.where(d2 < 0.0, beta, 1.0 - beta)  # of the smaller one
    log_m = log(tl.fma(weight, ratio - 1.0, 1.0))  # relative to the larger one
    d = d2 * LN2
    return tl.minimum(-d, 0.0) - log_m, tl.minimum(d, 0.0) - log_m


@triton.jit
def pair_statistics_step(
    sums,
    row_ptr,
    teacher_ptr,
    start,
    vocab,
    scaling,
    teacher_scaling,
    KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    R: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Load the block at `start` of both rows and add it to the accumulators of `update_pair`."""
    m, s, n, u, w = sums
    outer, inner2, _ = scaling
    teacher_outer, teacher_inner2, _ = teacher_scaling
    vectors = tl.arange(0, R)
    x = load_vectors(row_ptr, start, vocab, vectors, VEC, ALIGNED, TAIL, "evict_last")
    y = load_vectors(teacher_ptr, start, vocab, vectors, VEC, ALIGNED, TAIL, "evict_last")
    x = capped(x, inner2, SOFTCAP)
    y = capped(y, teacher_inner2, TEACHER_SOFTCAP)
    return update_pair(m, s, n, u, w, x, y, outer * LOG2E, teacher_outer * LOG2E, KIND)


@triton.jit
def mixture_step(
    sums,
    row_ptr,
    teacher_ptr,
    start,
    vocab,
    side,
    teacher_side,
    beta,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    R: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Add the block at `start` to the sums (R,) of p log(p / m) and q log(q / m)."""
    student, teacher = sums
    vectors = tl.arange(0, R)
    x = load_vectors(row_ptr, start, vocab, vectors, VEC, ALIGNED, TAIL, "evict_last")
    y = load_vectors(teacher_ptr, start, vocab, vectors, VEC, ALIGNED, TAIL, "evict_last")
    log2_of_p, _ = log2_p(x, side, SOFTCAP)
    log2_of_q, _ = log2_p(y, teacher_side, TEACHER_SOFTCAP)
    from_p, from_q = mixture_log_ratios(log2_of_p, log2_of_q, beta)
    student += tl.sum(tl.exp2(log2_of_p) * from_p, axis=1)
    teacher += tl.sum(tl.exp2(log2_of_q) * from_q, axis=1)
    return student, teacher


@triton.jit
def pair_gradient_step(
    row_ptr,
    teacher_ptr,
    out_ptr,
    start,
    vocab,
    side,
    teacher_side,
    factor,
    student_kl,
    beta,
    KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    R: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Load the block at `start` of both rows, and store the gradient; out_ptr may be row_ptr."""
    x = load_block(row_ptr, start, vocab, R, VEC, ALIGNED, TAIL)
    y = load_block(teacher_ptr, start, vocab, R, VEC, ALIGNED, TAIL)
    log2_of_p, slope = log2_p(x, side, SOFTCAP)
    log2_of_q, _ = log2_p(y, teacher_side, TEACHER_SOFTCAP)
    p = tl.exp2(log2_of_p)
    if KIND == FORWARD_KL:
        g = p - tl.exp2(log2_of_q)
    elif KIND == REVERSE_KL:
        g = tl.where(p > 0.0, p * tl.fma(log2_of_p - log2_of_q, LN2, -student_kl), 0.0)
    else:
        from_p, _ = mixture_log_ratios(log2_of_p, log2_of_q, beta)
        g = p * (from_p - student_kl)
    store_block(out_ptr, g * factor * slope, start, vocab, R, VEC, ALIGNED, TAIL)
