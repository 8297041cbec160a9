"""The arithmetic that the row kernels share: accurate scalar functions, the transform, the online update and its fold.

Nothing here comes from libdevice, so that the same code runs on CUDA, on ROCm and in the interpreter. Shapes: a block
of a row is R vectors of VEC consecutive columns; `m`, `s` and `w` are accumulators, one each per vector of the block.
"""

# ruff: noqa: D103

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693145751953125)  # 12 bits: its product with a small integer is exact in float32
LN2_LOW = tl.constexpr(1.428606765330187e-06)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # initial value of the maximum: finite, and not above any finite logit
FLOOR = tl.constexpr(-200.0)  # lower bound of exponents in base 2: 2**-200 is 0 in float32, and 0 * -200 is not NaN
TWO_INFINITIES = tl.constexpr(-8323200)  # 0xFF80FF80: a word of two bfloat16 -inf
FIXED = tl.constexpr(1099511627776.0)  # 2**40: accumulators are summed in fixed point with the unit 2**-40


# --- scalar functions with small relative errors ----------------------------------------------------------------------


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divide(a, b):
    """a / b, accurate for finite numbers: the hardware's quotient is 2 units off, and z would be too."""
    q = a / b
    return q + tl.fma(-q, b, a) / b


@triton.jit
def _reduced(x):
    """2**n and f = x - n ln 2 in [-0.35, 0.35], n an integer, for x clamped to where e**x is a normal number."""
    x = minimum(maximum(x, -87.0), 88.7)
    n = tl.minimum(tl.floor(x * LOG2E + 0.5), 127.0)
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return power, tl.fma(n, -LN2_LOW, tl.fma(n, -LN2_HIGH, x))


@triton.jit
def _expm1_rest(f):
    """(e**f - 1 - f) / f**2 for |f| <= 0.35, by its series."""
    q = tl.fma(f, 1.9841270e-4, 1.3888889e-3)
    q = tl.fma(f, q, 8.3333333e-3)
    q = tl.fma(f, q, 4.1666667e-2)
    q = tl.fma(f, q, 1.6666667e-1)
    return tl.fma(f, q, 0.5)


@triton.jit
def _expm1_near_0(f):
    """e**f - 1 for |f| <= 0.35."""
    return tl.fma(f * f, _expm1_rest(f), f)


@triton.jit
def exp(x):
    power, f = _reduced(x)
    y = tl.where(x < -87.0, 0.0, tl.fma(power, _expm1_near_0(f), power))
    return tl.where(x > 88.7, float("inf"), y)


@triton.jit
def expm1(x):
    power, f = _reduced(x)
    # power = 1 gives the series itself; otherwise power - 1 is at least 1/2 away from 0 and nothing cancels.
    return tl.where(x > 88.7, float("inf"), tl.fma(power, _expm1_near_0(f), power - 1.0))


@triton.jit
def expm1_minus(x):
    """e**x - 1 - x; near 0, the remainder of the series."""
    near = minimum(maximum(x, -0.35), 0.35)
    return tl.where(near == x, near * near * _expm1_rest(near), expm1(x) - x)


@triton.jit
def _upper(x):
    """x without the lower half of its mantissa: a product of two such numbers is exact."""
    return (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def exp_of_exp(x, a, b):
    """e**(b - a (e**x - 1)), for finite numbers.

    An exponent of 70 may be off by 1e-5 after a few roundings. So it is kept in two parts: an exact float32 and a small
    remainder.
    """
    power, f = _reduced(x)
    q = _expm1_near_0(f)
    s = tl.fma(power, q, power - 1.0)
    s_upper, a_upper = _upper(s), _upper(a)
    product = a_upper * s_upper
    exponent = b - product
    # The rounding errors of the subtraction (two-sum) and of e**x - 1, and the other parts of its product with a.
    part = exponent - b
    lost = (b - (exponent - part)) - (product + part)
    s_rest = (s - s_upper) + tl.fma(power, q, (power - 1.0) - s)
    rest = lost - tl.fma(a, s_rest, (a - a_upper) * s_upper)
    y = exp(exponent)
    return tl.where(y == 0.0, 0.0, y * exp(rest))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def _log1p_near_0(f):
    """log(1 + f) for f in [-0.3, 0.42]: 2 atanh(f / (2 + f)) by its series."""
    r = f / (2.0 + f)
    q = r * r
    p = tl.fma(q, 0.11111111, 0.14285714)
    p = tl.fma(q, p, 0.2)
    p = tl.fma(q, p, 0.33333333)
    return 2.0 * tl.fma(r * q, p, r)


@triton.jit
def log(x):
    """log x for normal x > 0; -inf at 0, NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23  # x = 2**n times a number in [sqrt(1/2), sqrt(2))
    f = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1.0
    n = n.to(tl.float32)
    y = tl.fma(n, LN2_HIGH, tl.fma(n, LN2_LOW, _log1p_near_0(f)))
    y = tl.where(x == 0.0, -float("inf"), y)
    return tl.where((x == x) & (x != float("inf")), y, x)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0."""
    return tl.where(x < 0.4, _log1p_near_0(tl.minimum(x, 0.4)), log(1.0 + x))


# --- from a logit to z ------------------------------------------------------------------------------------------------


@triton.jit
def scales(row, transform, temperatures_ptr, SOFTCAP: tl.constexpr):
    """A row's outer, inner2 and slope; `transform` is (temperature, logit_scale, softcap).

    Without a softcap, z = outer * x and dz/dx = slope. With one, z = outer * tanh(y) and dz/dx = slope * tanh'(y),
    where y = logit_scale x / softcap and inner2 x = -2 y log2(e).
    """
    temperature, logit_scale, softcap = transform
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
    slope = divide(logit_scale, temperature)
    if SOFTCAP:
        return divide(softcap, temperature), divide(logit_scale, softcap) * (-2.0 * LOG2E), slope
    else:
        return slope, 0.0, slope


@triton.jit
def tanh_and_slope(exponent):
    """tanh y and its derivative, for tensors, given exponent = -2 y log2(e). The absolute error of tanh is below 2e-7.

    The derivative keeps its relative accuracy even if tanh rounds to 1.
    """
    e = tl.exp2(minimum(exponent, 126.0))
    r = 1.0 / (1.0 + e)
    return (1.0 - e) * r, 4.0 * (e * r) * r


@triton.jit
def capped(x, inner2, SOFTCAP: tl.constexpr):
    """z / outer, of which the running maximum is taken; -inf stays -inf."""
    if SOFTCAP:
        t, _ = tanh_and_slope(x * inner2)
        return tl.where(x == -float("inf"), x, t)
    else:
        return x


# --- loading a block --------------------------------------------------------------------------------------------------


@triton.jit
def block_columns(vectors, VEC: tl.constexpr):
    """The columns (R, VEC) of the vectors (R,) of the block that starts at 0."""
    return vectors[:, None] * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def load_target(target_ptr, vocab):
    """The target's column; -1 if it is outside [0, V)."""
    target = tl.load(target_ptr)
    return tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)


@triton.jit
def load_logit(row_ptr, column):
    """One logit, float32; -inf for the column -1."""
    return tl.load(row_ptr + column, mask=column >= 0, other=-float("inf")).to(tl.float32)


@triton.jit
def is_column(start, column, vectors, VEC: tl.constexpr):
    """The mask (R, VEC) of `column` in the block at `start`; all false if the column is outside the block."""
    local = column - start
    return (vectors == local // VEC)[:, None] & (tl.arange(0, VEC) == local % VEC)[None, :]


@triton.jit
def row_pointer(ptr, row, columns_b, stride_a, stride_b, ALIGNED: tl.constexpr):
    """The address of row (row // B, row % B), with a hint to the compiler if rows are aligned."""
    offset = (row // columns_b).to(tl.int64) * stride_a + (row % columns_b).to(tl.int64) * stride_b
    ptr += offset
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def inside(start, vocab, vectors, VEC: tl.constexpr):
    """Which entries (R, VEC) of the block at `start` are inside an aligned row, vector by vector."""
    return (start + vectors * VEC < vocab)[:, None] & (tl.arange(0, VEC)[None, :] >= 0)


@triton.jit
def tile(start, vocab, R: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr):
    """A block's columns and which are in the row, for elementwise work: (R, VEC) if aligned, else (R * VEC,)."""
    if ALIGNED:
        columns = start + block_columns(tl.arange(0, R), VEC)
        mask = inside(start, vocab, tl.arange(0, R), VEC)
    else:
        columns = start + tl.arange(0, R * VEC)
        mask = columns < vocab
    return columns, mask


@triton.jit
def _column(
    row_ptr, start, vocab, vectors, i: tl.constexpr, VEC: tl.constexpr, TAIL: tl.constexpr, EVICT: tl.constexpr
):
    """Entry i of each vector, (R,)."""
    columns = start + vectors * VEC + i
    if TAIL:
        return tl.load(row_ptr + columns, mask=columns < vocab, other=-float("inf"), eviction_policy=EVICT)
    else:
        return tl.load(row_ptr + columns, eviction_policy=EVICT)


@triton.jit
def load_vectors(
    row_ptr, start, vocab, vectors, VEC: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr, EVICT: tl.constexpr
):
    """The block at `start`, (R, VEC) float32, each vector in one thread for any alignment of the row; -inf outside V.

    An aligned vector is one 16-byte load. Otherwise VEC narrow loads are joined into the same layout, so that sums
    within a vector have the same order and a row's result does not depend on its address.
    """
    if ALIGNED and row_ptr.dtype.element_ty == tl.bfloat16:
        # Two entries per word: a shift or a mask makes each a float32; casts take three instructions per two entries.
        H: tl.constexpr = VEC // 2
        pointers = row_ptr.to(tl.pointer_type(tl.int32)) + start // 2 + block_columns(vectors, H)
        if TAIL:
            mask = inside(start // 2, vocab // 2, vectors, H)
            words = tl.load(pointers, mask=mask, other=TWO_INFINITIES, eviction_policy=EVICT)
        else:
            words = tl.load(pointers, eviction_policy=EVICT)
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), [vectors.shape[0], VEC])
    elif ALIGNED:
        pointers = row_ptr + start + block_columns(vectors, VEC)
        if TAIL:
            mask = inside(start, vocab, vectors, VEC)
            x = tl.load(pointers, mask=mask, other=-float("inf"), eviction_policy=EVICT)
        else:
            x = tl.load(pointers, eviction_policy=EVICT)
        return x.to(tl.float32)
    else:
        tl.static_assert(VEC == 4 or VEC == 8)
        # Entry by entry. join(a, b) appends an axis of length 2: join indices that differ in their highest bit first.
        x0 = tl.join(
            _column(row_ptr, start, vocab, vectors, 0, VEC, TAIL, EVICT),
            _column(row_ptr, start, vocab, vectors, VEC // 2, VEC, TAIL, EVICT),
        )
        x1 = tl.join(
            _column(row_ptr, start, vocab, vectors, 1, VEC, TAIL, EVICT),
            _column(row_ptr, start, vocab, vectors, VEC // 2 + 1, VEC, TAIL, EVICT),
        )
        if VEC == 8:
            x2 = tl.join(
                _column(row_ptr, start, vocab, vectors, 2, VEC, TAIL, EVICT),
                _column(row_ptr, start, vocab, vectors, 6, VEC, TAIL, EVICT),
            )
            x3 = tl.join(
                _column(row_ptr, start, vocab, vectors, 3, VEC, TAIL, EVICT),
                _column(row_ptr, start, vocab, vectors, 7, VEC, TAIL, EVICT),
            )
            x0 = tl.join(x0, x2)
            x1 = tl.join(x1, x3)
        return tl.reshape(tl.join(x0, x1), [vectors.shape[0], VEC]).to(tl.float32)


@triton.jit
def load_block(row_ptr, start, vocab, R: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr):
    """The block at `start` in float32 for elementwise work, in the shape of `tile`."""
    if ALIGNED:
        return load_vectors(row_ptr, start, vocab, tl.arange(0, R), VEC, ALIGNED, TAIL, "evict_first")
    else:
        columns, mask = tile(start, vocab, R, VEC, ALIGNED)
        if TAIL:
            return tl.load(row_ptr + columns, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        else:
            return tl.load(row_ptr + columns, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_block(
    row_ptr, x, start, vocab, R: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr
):
    """Store x, in the shape of `tile`, to the block at `start`."""
    columns, mask = tile(start, vocab, R, VEC, ALIGNED)
    if TAIL:
        tl.store(row_ptr + columns, x.to(row_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    else:
        tl.store(row_ptr + columns, x.to(row_ptr.dtype.element_ty), eviction_policy="evict_first")


# --- row statistics ---------------------------------------------------------------------------------------------------


@triton.jit
def update(m, s, w, x, outer2):
    """Add a block to the accumulators: m = max x, s = sum 2**d, w = sum d 2**d, d = outer2 (x - m) clamped to FLOOR.

    m, s, w: (R,) float32; x: (R, VEC) float32, z / outer; outer2: outer * log2(e), a scalar or (R,). A NaN in x makes s
    and w NaN.
    """
    if len(outer2.shape) == 0:
        factor = outer2
    else:
        factor = outer2[:, None]
    top = tl.maximum(m, tl.max(x, axis=1))
    # The difference comes first, so that a constant added to all logits changes nothing.
    d = maximum((x - top[:, None]) * factor, FLOOR)
    e = tl.exp2(d)
    shift = tl.maximum((m - top) * outer2, FLOOR)
    scale = tl.exp2(shift)
    w = tl.fma(scale, tl.fma(shift, s, w), tl.sum(d * e, axis=1))
    s = tl.fma(scale, s, tl.sum(e, axis=1))
    return top, s, w


@triton.jit
def fold(m, s, w, outer2, AXIS: tl.constexpr):
    """Combine accumulators along AXIS, exactly: the result does not depend on the order or the layout.

    The accumulator with the largest m has s >= 1 (or all are empty), so the sums are taken in fixed point with the unit
    2**-40, which is far below the rounding of float32, and integer addition is associative. A NaN in s makes m
    infinite, which it is in no finite row.
    """
    m = tl.where(s == s, m, float("inf"))
    top = tl.max(m, axis=AXIS)
    shift = tl.maximum((m - tl.expand_dims(top, AXIS)) * outer2, FLOOR)
    scale = tl.exp2(shift)
    # Both sums in one reduction: its barriers and exchanges through shared memory come once.
    pairs = (tl.join(scale * s, scale * tl.fma(shift, s, w)) * FIXED).to(tl.int64)
    s, w = tl.split(tl.sum(pairs, axis=AXIS).to(tl.float32) * (1.0 / FIXED))
    return top, tl.where(top == float("inf"), float("nan"), s), w


@triton.jit
def finish(m, s, w, target, valid, outer):
    """logprob, entropy, maximum and log_sum of a row, from the fold of its other entries and the target's z / outer.

    s does not include the target, so a confident token's log-probability is -log1p(s) and loses no digits. The maximum
    is rounded; log_sum is relative to the rounded value, else all p_j = exp(z_j - maximum - log_sum) would be off.
    """
    m = tl.where(s == s, m, s)
    top = maximum(m, target)
    u2 = maximum((target - top) * (outer * LOG2E), FLOOR)
    u = (target - top) * outer
    e = tl.exp2(u2)
    shift = maximum((m - top) * (outer * LOG2E), FLOOR)
    scale = tl.exp2(shift)
    w = scale * tl.fma(shift, s, w)
    s = scale * s
    total = s + e
    empty = total == 0.0  # every logit is -inf
    log_sum = tl.where(empty, float("nan"), tl.where(u == 0.0, log1p(s), log(total)))
    entropy = log_sum - LN2 * (tl.fma(u2, e, w) / total)
    logprob = tl.where((target == -float("inf")) & (log_sum == log_sum), target, u - log_sum)
    logprob = tl.where(valid, logprob, float("nan"))
    highest = top * outer
    # Not by a difference with itself: the compiler would form that by an fma too, which is the rounding, not 0.
    rounded_off = tl.where(tl.abs(highest) < float("inf"), tl.fma(top, outer, -highest), 0.0)
    return logprob, entropy, tl.where(empty, -float("inf"), highest), log_sum + rounded_off


@triton.jit
def empty_sums(R: tl.constexpr):
    """The accumulators (m, s, w) of R vectors before the first block."""
    return tl.full([R], LOWEST, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)


@triton.jit
def add_block(
    sums,
    row_ptr,
    start,
    vocab,
    column,
    vectors,
    scaling,
    SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TAIL: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Load the block at `start` and add it to the accumulators, without the target, which is in `column`."""
    m, s, w = sums
    outer, inner2, _ = scaling
    x = load_vectors(row_ptr, start, vocab, vectors, VEC, ALIGNED, TAIL, EVICT)
    if TAIL:  # noqa: SIM114  (at compile time; the next at run time)
        x = tl.where(is_column(start, column, vectors, VEC), -float("inf"), x)
    elif (column >= start) & (column < start + vectors.shape[0] * VEC):
        x = tl.where(is_column(start, column, vectors, VEC), -float("inf"), x)
    return update(m, s, w, capped(x, inner2, SOFTCAP), outer * LOG2E)


@triton.jit
def store_each(ptr, stride, values, mask=None):
    """Store the values of a tuple, one every `stride`."""
    for i in tl.static_range(len(values)):
        tl.store(ptr + i * stride, values[i], mask=mask)


# --- which thread has which vector ------------------------------------------------------------------------------------

# Threads that have a segment's vectors in turn, 128: 4 warps, as in `row_statistics`.
_IN_TURN = tl.constexpr(128)


@triton.jit
def vectors_in_turn(R: tl.constexpr, SEGMENTS: tl.constexpr):
    """The vectors (R,) of a step of SEGMENTS blocks, in an order in which each thread has those of one segment.

    Entry i is vector i % 128 of every 128; the segments take turns. So `fold` adds up most of a segment in the threads,
    and its exchange between threads is one vector's per thread.
    """
    i = tl.arange(0, R)
    if SEGMENTS == 1:
        return i
    else:
        ROUNDS: tl.constexpr = R // (SEGMENTS * _IN_TURN)
        return (i // _IN_TURN % SEGMENTS * ROUNDS + i // (_IN_TURN * SEGMENTS)) * _IN_TURN + i % _IN_TURN


@triton.jit
def by_segment(x, SEGMENTS: tl.constexpr):
    """(R,) in the order of `vectors_in_turn`, as (SEGMENTS, R / SEGMENTS)."""
    if SEGMENTS == 1:
        return tl.reshape(x, [1, x.shape[0]])
    else:
        ROUNDS: tl.constexpr = x.shape[0] // (SEGMENTS * _IN_TURN)
        x = tl.permute(tl.reshape(x, [ROUNDS, SEGMENTS, _IN_TURN]), [1, 0, 2])
        return tl.reshape(x, [SEGMENTS, ROUNDS * _IN_TURN])


# --- row gradient -----------------------------------------------------------------------------------------------------


@triton.jit
def is_idle(statistics, c, h):
    """Whether a row's gradient is 0. h is None if the entropy has no gradient."""
    logprob, _, _, log_sum = statistics
    idle = (logprob == logprob) & (c == 0.0) & (log_sum == log_sum)
    if h is not None:
        idle = idle & (h == 0.0)
    return idle


@triton.jit
def gradient_scalars(statistics, c, h, slope):
    """A row's scalars for `gradient_block`: (maximum, a, b, shift2, at_target). h is None as in `is_idle`.

    For j other than the target, g_j = slope_j p_j (a + b log2 p_j), where log2 p_j = (z_j - maximum) log2(e) + shift2;
    slope_j is `slope` times the softcap's factor. The target's entry without that factor is at_target, computed from
    its log-probability. A NaN log-probability makes all gradient entries NaN.
    """
    logprob, entropy, maximum_z, log_sum = statistics
    a = tl.where(logprob == logprob, -c * slope, float("nan"))
    at_target = -c * expm1(logprob)
    b = 0.0
    if h is not None:
        a = a - h * entropy * slope
        b = -h * slope * LN2
        at_target = at_target - h * exp(logprob) * (tl.maximum(logprob, -1e4) + entropy)
    return maximum_z, a, b, -log_sum * LOG2E, at_target * slope


@triton.jit
def gradient_block(x, scalars, scaling, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr):
    """The gradient of a block of raw logits x, float32, as if none were the target; and the target's gradient."""
    maximum_z, a, b, shift2, at_target = scalars
    outer, inner2, _ = scaling
    if SOFTCAP:
        t, factor = tanh_and_slope(x * inner2)
        x = tl.where(x == -float("inf"), x, t)
    log2_p = tl.fma(tl.fma(x, outer, -maximum_z), LOG2E, shift2)
    if ENTROPY:
        log2_p = maximum(log2_p, FLOOR)
        g = tl.exp2(log2_p) * tl.fma(log2_p, b, a)
    else:
        g = tl.exp2(log2_p) * a
    if SOFTCAP:
        g = g * factor
        at_target = at_target * factor
    return g, at_target


@triton.jit
def gradient_step(
    row_ptr,
    out_ptr,
    start,
    vocab,
    column,
    scalars,
    scaling,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    R: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Load the block at `start`, compute its gradient and store it; out_ptr may be row_ptr."""
    x = load_block(row_ptr, start, vocab, R, VEC, ALIGNED, TAIL)
    g, at_target = gradient_block(x, scalars, scaling, SOFTCAP, ENTROPY)
    if (column >= start) & (column < start + R * VEC):
        if ALIGNED:
            g = tl.where(is_column(start, column, tl.arange(0, R), VEC), at_target, g)
        else:
            g = tl.where(start + tl.arange(0, R * VEC) == column, at_target, g)
    store_block(out_ptr, g, start, vocab, R, VEC, ALIGNED, TAIL)


@triton.jit
def store_zeros(out_ptr, first, last, R: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr):
    """Store zeros to the columns [first, last) of a row."""
    for start in range(first, last, R * VEC):
        columns, mask = tile(start, last, R, VEC, ALIGNED)
        zeros = tl.zeros(columns.shape, out_ptr.dtype.element_ty)
        tl.store(out_ptr + columns, zeros, mask=mask, eviction_policy="evict_first")


# --- the objective of a row -------------------------------------------------------------------------------------------


@triton.jit
def load_or(ptr, row, absent):
    """The row's number; `absent` if there is no tensor."""
    if ptr is not None:
        return tl.load(ptr + row)
    else:
        return absent


@triton.jit
def store_row_terms(row, statistics, inputs, numbers, out_ptr, rows, OBJECTIVE: tl.constexpr):
    """Run a row-local objective on the row's statistics: store what `LossTerms` has of it, and return c and h.

    `inputs` are the pointers, or None, of `RowInputs`. OBJECTIVE is a device function like `token_terms` of
    `fastrl.objectives.formulas`, of which it is given what follows the functions.
    """
    logprob, entropy, _, _ = statistics
    advantages_ptr, policy_weights_ptr, old_ptr, ref_ptr, rollout_ptr = inputs[:5]
    kl_weights_ptr, entropy_weights_ptr, entropy_threshold_ptr = inputs[5:]
    old = load_or(old_ptr, row, logprob)
    values = (
        tl.load(advantages_ptr + row),
        tl.load(policy_weights_ptr + row),
        old,
        load_or(ref_ptr, row, logprob),
        load_or(rollout_ptr, row, old),
        load_or(kl_weights_ptr, row, 0.0),
        load_or(entropy_weights_ptr, row, 0.0),
        load_or(entropy_threshold_ptr, 0, -1e30),
    )
    terms = OBJECTIVE(logprob, entropy, values, numbers)
    stride, out_ptr = rows.to(tl.int64), out_ptr + row
    tl.store(out_ptr, logprob)
    tl.store(out_ptr + stride, entropy)
    for i in tl.static_range(8):
        tl.store(out_ptr + (2 + i) * stride, terms[i])
    return terms[8], terms[9]
