// Forward-gradient with the row on chip: statistics, objective and gradient of a row by one read and one write of it.
// The contract is that of kernels/row_forward_gradient.py, for rows of 16-bit logits that consist of whole 16-byte
// vectors at 16-byte-aligned addresses.
//
// A step is SEGMENTS pieces of 4096 columns. A cluster of SEGMENTS blocks shares a row: block i takes piece i of each
// step. The pieces of whole steps lie in shared memory, copied there by bulk loads that all start at once; the last,
// incomplete step lies in registers, for which the pieces leave no room if three blocks are to fit on a multiprocessor.
// The grouping of columns, the fold and the order of roundings are those of kernels/device_functions.py, whose
// functions have the same names here: a row's statistics are meant to be those of `row_statistics` to the bit. So
// nothing is contracted by the compiler (--fmad=false): each fmaf is written where Triton's compiler forms one.
#pragma once

#include "device.cuh"
#include "fastrl_formulas.h"

namespace fastrl {

constexpr int VECTOR = 8;      // columns in 16 bytes
constexpr int PIECE = 4096;    // columns of a block's part of a step: a block of fastrl.kernels.configuration
constexpr int MAX_PIECES = 28;  // of 8 KB, in the 227 KB that a block may have
constexpr int WARP = 32, MAX_WARPS = 16, MAX_SEGMENTS = 4;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float LN2_HIGH = 0.693145751953125f, LN2_LOW = 1.428606765330187e-06f;
constexpr float LOWEST = -3.4028234663852886e38f;
constexpr float FLOOR = -200.0f;
constexpr float FIXED = 1099511627776.0f;  // 2^40

using formulas::ENTROPY_THRESHOLD, formulas::INPUTS, formulas::OLD, formulas::REF, formulas::ROLLOUT;

// The struct mirrors that of fastrl/backend/cuda/row_forward_gradient.py, field by field.
struct Arguments {
  const void* logits;          // (A, B, V), strides in elements
  void* out;                   // (A, B, V); may be the logits
  const long long* targets;    // (N,), N = A * B
  const unsigned char* mask;   // (N,), or null
  const float* temperatures;   // (N,), or null: use `temperature`
  const float* inputs[INPUTS];  // (N,), or null, in the order of formulas::Input; the threshold is one number
  float* results;              // (2 + 8, N): logprobs, entropy, the objective's terms
  long long stride_a, stride_b, out_stride_a, out_stride_b;
  double numbers[formulas::NUMBERS];  // of the objective
  int rows, columns_b, vocab;
  float temperature, logit_scale, softcap;
};

struct Sums {
  float m, s, w;  // max x, sum 2^d, sum d 2^d, d = outer2 (x - m)
};

struct Scales {
  float outer, inner2, slope;
};

// What the threads of a block share besides the pieces, which follow it.
struct alignas(128) Shared {
  Arrival arrivals[MAX_PIECES], exchanged;
  long long s[MAX_WARPS], w[MAX_WARPS];
  float maxima[MAX_WARPS];
  Sums segments[MAX_SEGMENTS];  // written by the blocks of the cluster
  float inputs[INPUTS], target;  // of the row; the target's logit
  Scales scales;                 // kept here for the time of the objective, which needs the registers
  int column;
  float maximum, a, b, shift2, at_target;
  bool idle;
};

// --- scalar functions ------------------------------------------------------------------------------------------------

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float NOT_A_NUMBER = __builtin_bit_cast(float, 0x7fc00000);

inline float divide(float a, float b) {
  const float q = quotient(a, b);
  return q + quotient(fmaf(-q, b, a), b);
}

struct Reduced {
  float power, f;  // 2^n, and x - n ln 2
};

inline Reduced reduced(float x) {
  x = minimum(maximum(x, -87.0f), 88.7f);
  const float n = fminf(floorf(fmaf(x, LOG2E, 0.5f)), 127.0f);
  return {bits_to_float(unsigned(int(n) + 127) << 23), fmaf(n, -LN2_LOW, fmaf(n, -LN2_HIGH, x))};
}

inline float expm1_near_0(float f) {
  float q = fmaf(f, 1.9841270e-4f, 1.3888889e-3f);
  q = fmaf(f, q, 8.3333333e-3f);
  q = fmaf(f, q, 4.1666667e-2f);
  q = fmaf(f, q, 1.6666667e-1f);
  return fmaf(f * f, fmaf(f, q, 0.5f), f);
}

inline float exp(float x) {
  const Reduced r = reduced(x);
  const float y = x < -87.0f ? 0.0f : fmaf(r.power, expm1_near_0(r.f), r.power);
  return x > 88.7f ? INF : y;
}

inline float expm1(float x) {
  const Reduced r = reduced(x);
  return x > 88.7f ? INF : fmaf(r.power, expm1_near_0(r.f), r.power - 1.0f);
}

inline float log1p_near_0(float f) {
  const float r = quotient(f, 2.0f + f);
  const float q = r * r;
  float p = fmaf(q, 0.11111111f, 0.14285714f);
  p = fmaf(q, p, 0.2f);
  p = fmaf(q, p, 0.33333333f);
  return 2.0f * fmaf(r * q, p, r);
}

inline float log(float x) {
  const int bits = int(float_to_bits(x)), n = (bits - 0x3f3504f3) >> 23;
  const float y = log1p_near_0(bits_to_float(unsigned(bits) - (unsigned(n) << 23)) - 1.0f);
  if (x == 0.0f) return -INF;
  return x == x && x != INF ? fmaf(float(n), LN2_HIGH, fmaf(float(n), LN2_LOW, y)) : x;
}

// --- a row's arithmetic ----------------------------------------------------------------------------------------------

template <bool SOFTCAP>
Scales scales(const Arguments& arguments, int row) {
  const float temperature = arguments.temperatures != nullptr ? arguments.temperatures[row] : arguments.temperature;
  const float slope = divide(arguments.logit_scale, temperature);
  if constexpr (!SOFTCAP) return {slope, 0.0f, slope};
  const float inner2 = divide(arguments.logit_scale, arguments.softcap) * (-2.0f * LOG2E);
  return {divide(arguments.softcap, temperature), inner2, slope};
}

struct Capped {
  float value, slope;  // z / outer, and dz/dx over the row's slope
};

template <bool SOFTCAP>
Capped capped(float x, float inner2) {
  if constexpr (!SOFTCAP) return {x, 1.0f};
  const float e = exp2(minimum(x * inner2, 126.0f));
  const float r = reciprocal(1.0f + e);
  return {x == -INF ? x : (1.0f - e) * r, 4.0f * (e * r) * r};
}

template <class Element>
void widen(uint4 words, float (&x)[VECTOR]) {
  const unsigned pairs[] = {words.x, words.y, words.z, words.w};
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = Element::first(pairs[i]);
    x[2 * i + 1] = Element::second(pairs[i]);
  }
}

template <class Element>
uint4 narrow(const float (&x)[VECTOR]) {
  return {Element::pair(x[0], x[1]), Element::pair(x[2], x[3]), Element::pair(x[4], x[5]), Element::pair(x[6], x[7])};
}

// The vector with -inf as its entry i.
template <class Element>
uint4 without(uint4 words, int i) {
  const auto hidden = [&](unsigned word, int first) {
    const unsigned low = i == first ? Element::MINUS_INFINITY : word & 0xffff;
    return low | (i == first + 1 ? Element::MINUS_INFINITY << 16 : word & 0xffff0000);
  };
  return {hidden(words.x, 0), hidden(words.y, 2), hidden(words.z, 4), hidden(words.w, 6)};
}

template <class Element, bool SOFTCAP>
void update(Sums& sums, uint4 words, const Scales& scales, float outer2) {
  float x[VECTOR];
  widen<Element>(words, x);
  float top = sums.m;
  for (int i = 0; i < VECTOR; ++i) {
    x[i] = capped<SOFTCAP>(x[i], scales.inner2).value;
    top = fmaxf(top, x[i]);
  }
  float d[VECTOR], e[VECTOR];
  for (int i = 0; i < VECTOR; ++i) e[i] = exp2(d[i] = maximum((x[i] - top) * outer2, FLOOR));
  float s = e[0] + e[1], w = fmaf(d[0], e[0], d[1] * e[1]);
  for (int i = 2; i < VECTOR; ++i) s += e[i], w = fmaf(d[i], e[i], w);
  const float shift = fmaxf((sums.m - top) * outer2, FLOOR), scale = exp2(shift);
  sums = {top, fmaf(scale, sums.s, s), fmaf(scale, fmaf(shift, sums.s, sums.w), w)};
}

// A term of the fold of sums to the maximum `top`: their s and w in fixed point, whose sums have no rounding.
struct Term {
  long long s, w;
};
inline float fold_maximum(const Sums& sums) { return sums.s == sums.s ? sums.m : INF; }
inline Term fold_term(const Sums& sums, float top, float outer2) {
  const float shift = fmaxf((fold_maximum(sums) - top) * outer2, FLOOR), scale = exp2(shift);
  const float s = scale * sums.s * FIXED, w = scale * fmaf(shift, sums.s, sums.w) * FIXED;
  // Of a NaN, which has no fixed-point form, nothing is used.
  return top == INF ? Term{0, 0} : Term{(long long)s, (long long)w};
}
inline Sums folded(float top, long long s, long long w) {
  return {top, top == INF ? NOT_A_NUMBER : float(s) * (1.0f / FIXED), float(w) * (1.0f / FIXED)};
}

struct Statistics {
  float logprob, entropy, maximum, log_sum;
};

inline Statistics finish(Sums sums, float target, bool valid, float outer) {
  const float m = sums.s == sums.s ? sums.m : sums.s;
  const float top = maximum(m, target), outer2 = outer * LOG2E;
  const float u2 = maximum((target - top) * outer2, FLOOR), u = (target - top) * outer;
  const float e = exp2(u2);
  const float shift = maximum((m - top) * outer2, FLOOR), scale = exp2(shift);
  const float w = scale * fmaf(shift, sums.s, sums.w), s = scale * sums.s;
  const float total = fmaf(sums.s, scale, e);
  const bool empty = total == 0.0f;  // every logit is -inf
  const float at_maximum = s < 0.4f ? log1p_near_0(fminf(s, 0.4f)) : log(fmaf(sums.s, scale, 1.0f));
  const float log_sum = empty ? NOT_A_NUMBER : u == 0.0f ? at_maximum : log(total);
  const float entropy = fmaf(quotient(fmaf(u2, e, w), total), -LN2, log_sum);
  const float difference = fmaf(outer, target - top, -log_sum);
  const float logprob = target == -INF && log_sum == log_sum ? target : difference;
  const float highest = top * outer;
  const float rounded_off = highest < INF && highest > -INF ? fmaf(top, outer, -highest) : 0.0f;
  return {valid ? logprob : NOT_A_NUMBER, entropy, empty ? -INF : highest, log_sum + rounded_off};
}

// Into shared.a, b, shift2 and at_target, for gradient().
template <bool ENTROPY>
void gradient_scalars(Shared& shared, const Statistics& found, float c, float h, float slope, float slope_at_target) {
  const float a = found.logprob == found.logprob ? -c * slope : NOT_A_NUMBER;
  shared.a = ENTROPY ? fmaf(-slope, h * found.entropy, a) : a;
  shared.b = ENTROPY ? -h * slope * LN2 : 0.0f;
  float at_target = -c * expm1(found.logprob);
  if constexpr (ENTROPY) {
    const float from_entropy = h * exp(found.logprob) * (fmaxf(found.logprob, -1e4f) + found.entropy);
    at_target = fmaf(-c, expm1(found.logprob), -from_entropy);
  }
  shared.at_target = at_target * slope * slope_at_target;
  shared.shift2 = -found.log_sum * LOG2E;
  shared.maximum = found.maximum;
}

template <class Element, bool SOFTCAP, bool ENTROPY>
uint4 gradient(uint4 words, const Scales& scales, float maximum_z, float a, float b, float shift2) {
  float x[VECTOR];
  widen<Element>(words, x);
  for (int i = 0; i < VECTOR; ++i) {
    const Capped y = capped<SOFTCAP>(x[i], scales.inner2);
    float log2_p = fmaf(fmaf(y.value, scales.outer, -maximum_z), LOG2E, shift2), factor = a;
    if constexpr (ENTROPY) {
      log2_p = maximum(log2_p, FLOOR);
      factor = fmaf(log2_p, b, a);
    }
    x[i] = exp2(log2_p) * factor;
    if constexpr (SOFTCAP) x[i] *= y.slope;
  }
  return narrow<Element>(x);
}

// The address is formed anew where it is needed, so that it takes no registers in between.
template <class Element, int SEGMENTS>
Element* out_row(const Arguments& arguments) {
  const int row = block_index() / SEGMENTS;
  return (Element*)arguments.out + row / arguments.columns_b * arguments.out_stride_a +
         row % arguments.columns_b * arguments.out_stride_b;
}

// --- the kernel ------------------------------------------------------------------------------------------------------

// Block `segment` of the cluster that has row block_index() / SEGMENTS. `objective` has the arguments of
// formulas::token_terms that follow the functions.
template <class Element, int SEGMENTS, int THREADS, bool SOFTCAP, bool ENTROPY, class Objective>
void row_forward_gradient(const Arguments& arguments, const Objective& objective) {
  constexpr int STEP = PIECE * SEGMENTS, VECTORS = PIECE / VECTOR / THREADS, WARPS = THREADS / WARP;
  constexpr int RESULTS = 2 + formulas::TOKEN_TERMS - 2;
  const int thread = thread_index(), segment = SEGMENTS == 1 ? 0 : cluster_rank(), row = block_index() / SEGMENTS;
  const int vocab = arguments.vocab, pieces = vocab / STEP;
  const long long a = row / arguments.columns_b, b = row % arguments.columns_b;
  const Element* const logits = (const Element*)arguments.logits + a * arguments.stride_a + b * arguments.stride_b;
  Shared& shared = *(Shared*)shared_memory();
  uint4* const held = (uint4*)(shared_memory() + sizeof(Shared));  // [pieces][VECTORS][THREADS]

  // The thread's vector j of a step is in this column of the step.
  const auto column_of = [&](int j) { return segment * PIECE + (j * THREADS + thread) * VECTOR; };
  const auto write = [&](Element* out, int step, int j, uint4 words) {
    const int column = step * STEP + column_of(j);
    if (step < pieces || column < vocab) store_words(out + column, words);
  };
  const auto write_zeros = [&] {
    Element* const out = out_row<Element, SEGMENTS>(arguments);
    for (int step = 0; step <= pieces; ++step)
      for (int j = 0; j < VECTORS; ++j) write(out, step, j, uint4{});
  };

  if (arguments.mask != nullptr && !arguments.mask[row]) {
    if (segment == 0 && thread < RESULTS) arguments.results[(long long)thread * arguments.rows + row] = 0.0f;
    write_zeros();
    return;
  }

  // Load: all whole steps at once.
  if (thread == 0) {
    for (int i = 0; i < pieces; ++i) arrival_init(&shared.arrivals[i]);
    arrival_init(&shared.exchanged);
    arrivals_are_initialised();
    if constexpr (SEGMENTS > 1) arrival_expect(&shared.exchanged, SEGMENTS * sizeof(Sums));
    for (int i = 0; i < pieces; ++i) {
      const Element* from = logits + i * STEP + segment * PIECE;
      bulk_load(held + i * (PIECE / VECTOR), from, PIECE * sizeof(Element), &shared.arrivals[i]);
    }
  }
  // The second half, before the first store to another block's memory, waits until all blocks of the cluster run.
  if constexpr (SEGMENTS > 1) cluster_arrive();
  uint4 tail[VECTORS];
  for (int j = 0; j < VECTORS; ++j) {
    const unsigned none = Element::MINUS_INFINITY << 16 | Element::MINUS_INFINITY;
    const int column = pieces * STEP + column_of(j);
    tail[j] = column < vocab ? load_words(logits + column) : uint4{none, none, none, none};
  }
  const Scales scales = fastrl::scales<SOFTCAP>(arguments, row);
  const float outer2 = scales.outer * LOG2E;
  const long long target = arguments.targets[row];
  const int column = target >= 0 && target < vocab ? int(target) : -1;
  // Only one thread reads the target's place later: it takes it out of the sums, and writes its gradient.
  const auto owns = [&](int column) {
    return column >= 0 && column % STEP / PIECE == segment && column % PIECE / VECTOR % THREADS == thread;
  };
  const int place = column % PIECE / VECTOR, own_step = owns(column) ? column / STEP : -1;
  // The row's numbers, one per thread, which keeps it in a register while it is on its way.
  float number = thread == ENTROPY_THRESHOLD ? -1e30f : thread == INPUTS ? -INF : 0.0f;
  if (thread < INPUTS && arguments.inputs[thread] != nullptr)
    number = arguments.inputs[thread][thread == ENTROPY_THRESHOLD ? 0 : row];
  // Later, another block may have written the gradient there: they do after the sums of this block.
  if (thread == INPUTS && column >= 0) number = Element::first(logits[column].bits);

  // Loop: the sums, piece by piece as they arrive.
  Sums sums[VECTORS];
  for (Sums& x : sums) x = {LOWEST, 0.0f, 0.0f};
  block_barrier();  // the arrivals are initialised
#pragma unroll 1
  for (int i = 0; i < pieces; ++i) {
    uint4* const piece = held + i * (PIECE / VECTOR);
    arrival_wait(&shared.arrivals[i]);
    if (i == own_step) piece[place] = without<Element>(piece[place], column % VECTOR);
    for (int j = 0; j < VECTORS; ++j)
      update<Element, SOFTCAP>(sums[j], piece[j * THREADS + thread], scales, outer2);
  }
  for (int j = 0; j < VECTORS; ++j) {
    if (own_step == pieces && place / THREADS == j) tail[j] = without<Element>(tail[j], column % VECTOR);
    if (pieces * STEP < vocab) update<Element, SOFTCAP>(sums[j], tail[j], scales, outer2);
  }

  if (thread < INPUTS) shared.inputs[thread] = number;
  if (thread == INPUTS) shared.target = number, shared.scales = scales, shared.column = column;

  // Fold: the block's sums, which are the segment's.
  float top = -INF;
  for (const Sums& x : sums) top = fmaxf(top, fold_maximum(x));
  top = warp_max(top);
  if (thread % WARP == 0) shared.maxima[thread / WARP] = top;
  block_barrier();
  for (int i = 0; i < WARPS; ++i) top = fmaxf(top, shared.maxima[i]);
  Term term{0, 0};
  for (const Sums& x : sums) {
    const Term one = fold_term(x, top, outer2);
    term.s += one.s, term.w += one.w;
  }
  term = {warp_sum(term.s), warp_sum(term.w)};
  if (thread % WARP == 0) shared.s[thread / WARP] = term.s, shared.w[thread / WARP] = term.w;
  block_barrier();
  if constexpr (SEGMENTS > 1) cluster_wait();
  if (thread < SEGMENTS) {
    term = {0, 0};
    for (int i = 0; i < WARPS; ++i) term.s += shared.s[i], term.w += shared.w[i];
    const Sums found = folded(top, term.s, term.w);
    if constexpr (SEGMENTS == 1) {
      shared.segments[0] = found;
    } else {
      store_remote(&shared.segments[segment].m, thread, found.m, &shared.exchanged);
      store_remote(&shared.segments[segment].s, thread, found.s, &shared.exchanged);
      store_remote(&shared.segments[segment].w, thread, found.w, &shared.exchanged);
    }
  }
  block_barrier();  // no thread needs it, but it ends the life of registers

  // The objective, in each block alike.
  if (thread == 0) {
    // No block ends before all of the cluster have stored here: it waits for them.
    if constexpr (SEGMENTS > 1) arrival_wait(&shared.exchanged);
    top = -INF;
    for (int i = 0; i < SEGMENTS; ++i) top = fmaxf(top, fold_maximum(shared.segments[i]));
    term = {0, 0};
    for (int i = 0; i < SEGMENTS; ++i) {
      const Term one = fold_term(shared.segments[i], top, shared.scales.outer * LOG2E);
      term.s += one.s, term.w += one.w;
    }
    const Scales scales = shared.scales;
    const bool valid = shared.column >= 0;
    const Capped y = capped<SOFTCAP>(shared.target, scales.inner2);
    const Statistics found = finish(folded(top, term.s, term.w), y.value, valid, scales.outer);
    double x[INPUTS];
    for (int i = 0; i < INPUTS; ++i) x[i] = shared.inputs[i];
    const auto absent = [&](int input) { return arguments.inputs[input] == nullptr; };
    if (absent(OLD)) x[OLD] = found.logprob;
    if (absent(REF)) x[REF] = found.logprob;
    if (absent(ROLLOUT)) x[ROLLOUT] = x[OLD];
    const auto terms = objective(found.logprob, found.entropy, x, arguments.numbers);
    if (segment == 0) {
      float* results = arguments.results + row;
      const long long rows = arguments.rows;
      results[0] = found.logprob;
      results[rows] = found.entropy;
      for (int i = 2; i < RESULTS; ++i) results[i * rows] = float(terms[i - 2]);
    }
    const float c = float(terms[RESULTS - 2]), h = float(terms[RESULTS - 1]);
    shared.idle = valid && c == 0.0f && found.log_sum == found.log_sum && (!ENTROPY || h == 0.0f);
    gradient_scalars<ENTROPY>(shared, found, c, h, scales.slope, y.slope);
  }
  block_barrier();
  if (shared.idle) {
    write_zeros();
    return;
  }

  // Loop: the gradient. The target's entry is written over that of its vector by the same thread.
  Element* const out = out_row<Element, SEGMENTS>(arguments);
  const Scales row_scales = shared.scales;
  const float maximum_z = shared.maximum, scale_a = shared.a, scale_b = shared.b, shift2 = shared.shift2;
  const auto gradient_of = [&](uint4 words) {
    return gradient<Element, SOFTCAP, ENTROPY>(words, row_scales, maximum_z, scale_a, scale_b, shift2);
  };
#pragma unroll 1
  for (int i = 0; i < pieces; ++i)
    for (int j = 0; j < VECTORS; ++j)
      write(out, i, j, gradient_of(held[i * (PIECE / VECTOR) + j * THREADS + thread]));
  for (int j = 0; j < VECTORS; ++j) write(out, pieces, j, gradient_of(tail[j]));
  if (owns(shared.column)) out[shared.column].bits = (unsigned short)Element::pair(shared.at_target, 0.0f);
}

}  // namespace fastrl
