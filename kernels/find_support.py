"""The vocabulary entries that a sampler keeps (`find_support` of `fastrl.backend.contract`), without a sort.

A program owns a row. Every cut is a pivot: the smallest z such that the entries <= z weigh more than a limit. The
weights are 1 (top-k) or the probability (top-p). The pivot is found by an 8-ary search. Each sweep sums the weights
under 7 thresholds: first 1 to 64 below the maximum, then three times evenly between the two thresholds that enclose the
pivot, and from then on evenly in the order of the floats' bits. The search ends when all entries between the two are
equal: after at most 16 sweeps, mostly after 4 to 9. So a row is read at most 34 times, 2 and 16 per cut, mostly from
the second-level cache. The kernel that writes the columns after the counts are summed up reads it once more.

Weights are summed in float32 within 16 bytes of logits, and beyond that exactly, in fixed point with the unit 2**-40 of
the maximum's weight. So sums do not depend on layouts, and those of different sweeps agree. Exponentials have a
relative error within 1e-6. So for V up to 2**20 a pivot is right unless a cumulative probability is within 1e-6 of
1 - top_p.
"""

# ruff: noqa: D103

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.kernels.configuration import configuration, is_aligned, on_device, row_strides
from fastrl.kernels.device_functions import FIXED, LOG2E, load_vectors, row_pointer
from fastrl.kernels.jit import kernel

_WRONG = {-1: "a NaN", -2: "a +inf", -3: "nothing but -inf"}
_LEAST = tl.constexpr(-2139095040)  # the key of the lowest finite float32; that of -inf is one less
_BY_VALUE = tl.constexpr(4)  # the first sweep whose thresholds are evenly spaced in the order of the bits


# --- integer keys in the order of the floats --------------------------------------------------------------------------


@triton.jit
def key_of(z):
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)  # -0 and +0 have the same key
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def value_of(key):
    bits = tl.where(key == -1, -2, key).to(tl.int32)  # -1 would be -0, which is not less than +0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


# --- one sweep --------------------------------------------------------------------------------------------------------


@triton.jit
def load_z(
    row_ptr, start, vocab, temperature, R: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr
):
    """z of the block at `start`, (R, VEC) float32, -inf outside the row."""
    z = load_vectors(row_ptr, start, vocab, tl.arange(0, R), VEC, ALIGNED, True, "")
    if SCALED:
        z = tl.div_rn(z, tl.full([R, VEC], temperature, tl.float32))
    return z


@triton.jit
def fixed(w, UNIT: tl.constexpr):
    return (tl.sum(w, axis=1) * UNIT).to(tl.int64)


@triton.jit
def weigh(
    row_ptr,
    vocab,
    temperature,
    maximum,
    floor,
    low,
    high,
    thresholds,
    MASS: tl.constexpr,
    SCALED: tl.constexpr,
    R: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Weights of the entries >= `floor`: of all, and of those <= each threshold; least and largest z in (low, high]."""
    UNIT: tl.constexpr = FIXED if MASS else 1.0
    none = tl.zeros([R], tl.int64)
    total = none
    under = (none, none, none, none, none, none, none)
    least = tl.full([R], float("inf"), tl.float32)
    most = tl.full([R], -float("inf"), tl.float32)
    for start in range(0, vocab, R * VEC):
        z = load_z(row_ptr, start, vocab, temperature, R, VEC, ALIGNED, SCALED)
        w = tl.exp2((z - maximum) * LOG2E) if MASS else tl.full([R, VEC], 1.0, tl.float32)
        w = tl.where(z >= floor, w, 0.0)
        total += fixed(w, UNIT)
        more = tl.tuple(())
        for i in tl.static_range(7):
            more += (under[i] + fixed(tl.where(z <= thresholds[i], w, 0.0), UNIT),)
        under = more
        within = (z > low) & (z <= high)
        least = tl.minimum(least, tl.min(tl.where(within, z, float("inf")), axis=1))
        most = tl.maximum(most, tl.max(tl.where(within, z, -float("inf")), axis=1))
    sums = tl.tuple(())
    for i in tl.static_range(7):
        sums += (tl.sum(under[i]),)
    return tl.sum(total), sums, tl.min(least), tl.max(most)


# --- the search -------------------------------------------------------------------------------------------------------


@triton.jit
def threshold(i: tl.constexpr, sweep, low, high, maximum):
    """The key of threshold i of a sweep, in [low, high), increasing with i."""
    even = low + (high - low) * i // 8
    least = value_of(low)
    z = tl.where(sweep == 0, maximum - 2.0 ** (7 - i), least + (value_of(high) - least) * (i / 8))
    by_value = tl.minimum(tl.maximum(key_of(z), low), high - 1)
    # If the bracket reaches down to the lowest number, evenly spaced values would all be too low.
    return tl.where((sweep == 0) | ((sweep < _BY_VALUE) & (low >= _LEAST)), by_value, even)


@triton.jit
def narrowed(key, weight, limit, low, high, below):
    """The bracket (low, high] of the pivot and the weight up to low, narrowed by one threshold and its weight."""
    under = weight <= limit
    low, below = tl.where(under, key, low), tl.where(under, weight, below)
    return low, tl.where(under, high, tl.minimum(high, key)), below


@triton.jit
def search(
    row_ptr,
    vocab,
    temperature,
    maximum,
    floor,
    kept,
    MASS: tl.constexpr,
    SCALED: tl.constexpr,
    R: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The key of the pivot among entries with keys >= `floor`, and the weight left of the limit at the pivot.

    kept: the number of entries to keep; with MASS, the share of the mass that may be dropped.
    """
    low = floor - 1
    high = key_of(maximum)
    below = tl.full([], 0, tl.int64)
    limit = tl.full([], 0, tl.int64)
    sweep = tl.full([], 0, tl.int32)
    while (sweep == 0) | (low + 1 < high):
        keys = tl.tuple(())
        thresholds = tl.tuple(())
        for i in tl.static_range(1, 8):
            keys += (threshold(i, sweep, low, high, maximum),)
            thresholds += (value_of(keys[i - 1]),)
        total, sums, least, most = weigh(
            *(row_ptr, vocab, temperature, maximum, value_of(floor), value_of(low), value_of(high), thresholds),
            *(MASS, SCALED, R, VEC, ALIGNED),
        )
        if MASS:
            limit = (total.to(tl.float64) * kept).to(tl.int64)
        else:
            limit = total - kept
        # The largest entry always stays; if there are fewer than `kept` entries, all stay.
        limit = tl.maximum(tl.minimum(limit, total - 1), 0)
        for i in tl.static_range(7):
            low, high, below = narrowed(keys[i], sums[i], limit, low, high, below)
        low = tl.maximum(low, key_of(least) - 1)
        high = tl.minimum(high, key_of(most))
        sweep += 1
    return high, limit - below


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def largest(
    row_ptr, vocab, temperature, SCALED: tl.constexpr, R: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr
):
    """The row's largest z, and whether it has a NaN."""
    found = tl.full([R], -float("inf"), tl.float32)
    nan = tl.zeros([R], tl.int32)
    for start in range(0, vocab, R * VEC):
        x = load_vectors(row_ptr, start, vocab, tl.arange(0, R), VEC, ALIGNED, True, "")
        nan |= tl.max((x != x).to(tl.int32), axis=1)
        found = tl.maximum(found, tl.max(tl.where(x == x, x, -float("inf")), axis=1))
    maximum = tl.max(found)
    if SCALED:
        maximum = tl.div_rn(maximum, temperature)  # rounding keeps the order
    return maximum, tl.max(nan) > 0


@kernel()
def choose_kernel(
    logits_ptr,  # (A, B, V), unit stride on V
    pivots_ptr,  # (N,) float32, N = A * B: the entries above it are kept
    out_ptr,  # (2, N) int64: entries kept, or a key of _WRONG; how many of the first equal to the pivot are not kept
    rows: tl.int32,  # N
    columns_b: tl.int32,  # B
    vocab: tl.int32,  # V
    stride_a: tl.int64,
    stride_b: tl.int64,
    temperature: tl.float32,
    top_k: tl.int64,
    dropped_share: tl.float32,  # 1 - top_p
    log_min_p: tl.float32,
    log_min_p_rest: tl.float32,  # the rounding error of the float32 log_min_p
    SCALED: tl.constexpr,  # temperature is not 1
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    R: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Program (row,)."""
    row = tl.program_id(0)
    out_ptr += row
    row_ptr = row_pointer(logits_ptr, row, columns_b, stride_a, stride_b, ALIGNED)
    maximum, nan = largest(row_ptr, vocab, temperature, SCALED, R, VEC, ALIGNED)
    wrong = tl.where(maximum == float("inf"), -2, tl.where(maximum == -float("inf"), -3, 0))
    wrong = tl.where(nan, -1, wrong)
    if wrong < 0:
        tl.store(out_ptr, wrong.to(tl.int64))
        return

    pivot = tl.full([], _LEAST, tl.int64)
    rest = tl.full([], 0, tl.int64)
    if TOP_K:
        pivot, _ = search(row_ptr, vocab, temperature, maximum, pivot, top_k, False, SCALED, R, VEC, ALIGNED)
    if TOP_P:
        pivot, rest = search(row_ptr, vocab, temperature, maximum, pivot, dropped_share, True, SCALED, R, VEC, ALIGNED)

    # The smallest float32 that is at least maximum + log min_p.
    bound = maximum.to(tl.float64) + log_min_p + log_min_p_rest
    nearest = bound.to(tl.float32)
    least_key = tl.maximum(key_of(nearest) + (nearest.to(tl.float64) < bound).to(tl.int64), _LEAST)
    rest = tl.where(least_key > pivot, 0, rest)
    pivot_z = value_of(tl.maximum(least_key, pivot))

    # Count.
    kept = tl.zeros([R], tl.int32)
    ties = tl.zeros([R], tl.int32)
    for start in range(0, vocab, R * VEC):
        z = load_z(row_ptr, start, vocab, temperature, R, VEC, ALIGNED, SCALED)
        kept += tl.sum((z >= pivot_z).to(tl.int32), axis=1)
        ties += tl.sum((z == pivot_z).to(tl.int32), axis=1)
    weight = (tl.exp2((pivot_z - maximum) * LOG2E) * FIXED).to(tl.int64)
    dropped = tl.minimum(rest // tl.maximum(weight, 1), tl.maximum(tl.sum(ties).to(tl.int64) - 1, 0))
    tl.store(pivots_ptr + row, pivot_z)
    tl.store(out_ptr, tl.sum(kept).to(tl.int64) - dropped)
    tl.store(out_ptr + rows.to(tl.int64), dropped)


@kernel()
def write_kernel(
    logits_ptr,  # (A, B, V), unit stride on V
    pivots_ptr,  # (N,) float32
    dropped_ptr,  # (N,) int64
    offsets_ptr,  # (N + 1,) int64
    ids_ptr,  # (nnz,) int32
    columns_b: tl.int32,  # B
    vocab: tl.int32,  # V
    stride_a: tl.int64,
    stride_b: tl.int64,
    temperature: tl.float32,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row,)."""
    row = tl.program_id(0)
    row_ptr = row_pointer(logits_ptr, row, columns_b, stride_a, stride_b, False)
    pivot = tl.load(pivots_ptr + row)
    dropped = tl.load(dropped_ptr + row)
    ids_ptr += tl.load(offsets_ptr + row)
    seen = tl.full([], 0, tl.int64)  # entries equal to the pivot
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        if SCALED:
            z = tl.div_rn(z, tl.full([BLOCK], temperature, tl.float32))
        keep = z >= pivot
        if seen < dropped:
            ties = (z == pivot).to(tl.int32)
            keep = keep & ((ties == 0) | (seen + tl.cumsum(ties, 0) > dropped))
            seen += tl.sum(ties)
        count = tl.sum(keep.to(tl.int32))
        if count > 0:
            tl.store(ids_ptr + tl.cumsum(keep.to(tl.int32), 0) - 1, columns, mask=keep)
            ids_ptr += count


# --- launcher ---------------------------------------------------------------------------------------------------------


def lanes(vocab: int, vector: int) -> int:
    """Vectors per step of a program, one per thread: its 8 sums in 64 bits and a bracket fill 128 registers.

    Two vectors per thread spill on gfx942.
    """
    return min(256, max(64, triton.next_power_of_2(triton.cdiv(vocab, vector))))


def options(count: int, warp: int = 64 if torch.version.hip else 32) -> dict[str, int | bool]:
    """The compiler's options for a program of `count` vectors per step."""
    result: dict[str, int | bool] = {"num_warps": count // warp, "num_stages": 1, "enable_fp_fusion": True}
    return result | ({"maxnreg": 128} if warp == 32 else {})


def find_support(
    logits: Tensor,  # (A, B, V)
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[Tensor, Tensor]:
    """Token ids (nnz,) int32 and offsets (N + 1,) int64 of the N = A * B rows.

    ValueError names a row without a distribution. Uses 20 bytes per row in addition to the result. The host waits once,
    for the result's length.
    """
    a, b, vocab = logits.shape
    rows = a * b
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device), offsets
    columns_b, stride_a, stride_b = row_strides(logits)
    vector = configuration(vocab, logits.element_size()).vector
    count, scaled = lanes(vocab, vector), temperature != 1
    pivots = torch.empty(rows, dtype=torch.float32, device=logits.device)
    out = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    rounded = torch.tensor(log_min_p, dtype=torch.float32).item()
    place = (columns_b, vocab, stride_a, stride_b, float(temperature))
    with on_device(logits):
        choose_kernel[(rows,)](
            logits,
            pivots,
            out,
            rows,
            *place,
            top_k,
            1.0 - top_p,
            rounded,
            log_min_p - rounded if min_p > 0 else 0.0,
            SCALED=scaled,
            TOP_K=0 < top_k < vocab,
            TOP_P=top_p < 1,
            R=count,
            VEC=vector,
            ALIGNED=is_aligned(logits, vector),
            **options(count),
        )
        torch.cumsum(out[0], 0, out=offsets[1:])
        total, worst = torch.stack([offsets[-1], out[0].amin()]).tolist()
        if worst < 0:
            row = int((out[0] < 0).nonzero()[0])
            raise ValueError(f"logits row {row} has {_WRONG[int(out[0, row])]}")
        ids = torch.empty(total, dtype=torch.int32, device=logits.device)
        block = count * vector
        write_kernel[(rows,)](
            logits, pivots, out[1], offsets, ids, *place, SCALED=scaled, BLOCK=block, **options(count)
        )
    return ids, offsets
