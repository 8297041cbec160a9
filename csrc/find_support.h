// The vocabulary entries of one row that a sampler keeps, without a sort: `find_support` of
// fastrl/backend/contract.py.
//
// Every cut is a pivot: the smallest z such that the entries <= z weigh more than a limit. The weights are 1 (top-k) or
// e^(z - maximum) (top-p). A row is swept as follows:
// - one sweep finds its maximum;
// - for a cut, one sweep sums the weights above a few levels below the maximum, and one copies the entries between the
//   two levels around the pivot to a buffer, where at most three histograms, each over 11 bits of the floats' order,
//   narrow them to one value;
// - one sweep counts the kept entries, and one writes them after the host has summed up the counts.
// That is 3 sweeps without cuts, 5 with one, 6 with both (top-p then starts from the entries that top-k kept), and 1
// more if a level was so close to the limit that the float32 sums chose the wrong side. A thread's buffer holds at most
// a row.
//
// Masses are float32 exponentials with a relative error within 1e-6, summed in float64.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "vector.h"

namespace fastrl::search {

constexpr float LOWEST = -std::numeric_limits<float>::max();
constexpr int64_t SEGMENT = 2048;  // columns whose weights are summed in float32
constexpr int BITS = 11;
// The levels, as distances below the maximum: close to each other where most pivots are.
constexpr std::array<float, 16> DEPTHS = {0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 17, 21, 28};

// --- lanes -----------------------------------------------------------------------------------------------------------

typedef double Doubles __attribute__((vector_size(8 * W)));

inline Floats where(Ints condition, Floats x) { return (Floats)(condition & (Ints)x); }

template <class Vector>
double sum(const Vector& lanes) {
  double total = 0;
  for (int i = 0; i < W; ++i) total += lanes[i];
  return total;
}

// One bit per lane.
inline uint32_t bits(Ints keep) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)keep, (__m512i)keep);
#else
  uint32_t found = 0;
  for (int i = 0; i < W; ++i) found |= uint32_t(keep[i] & 1) << i;
  return found;
#endif
}

// Write the lanes of x that `keep` marks, without gaps; returns their number. `out` has room for W.
inline int append(Ints keep, Floats x, float* out) {
  const uint32_t mask = bits(keep);
#if defined(__AVX512F__)
  store(out, (Floats)_mm512_maskz_compress_ps(__mmask16(mask), (__m512)x));
#else
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) *out++ = x[std::countr_zero(rest)];
#endif
  return std::popcount(mask);
}

// The same for the numbers column + lane; `out` has room for the marked ones only.
inline int append_columns(Ints keep, int64_t column, int32_t* out) {
  const uint32_t mask = bits(keep);
  if (mask == 0) return 0;
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i columns = _mm512_add_epi32(_mm512_set1_epi32(int32_t(column)), lanes);
  const __mmask16 room = __mmask16((1u << std::popcount(mask)) - 1);
  _mm512_mask_storeu_epi32(out, room, _mm512_maskz_compress_epi32(__mmask16(mask), columns));
#else
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) *out++ = int32_t(column + std::countr_zero(rest));
#endif
  return std::popcount(mask);
}

// An unsigned integer key in the order of the floats; -0 and +0 have the same key.
inline uint32_t order(float z) {
  const uint32_t word = as_word(z + 0.0f);
  return word ^ (uint32_t(int32_t(word) >> 31) | 0x80000000);
}

template <class T, bool divides>
struct Row {
  const T* x;
  int64_t vocab;
  float temperature;

  // Call f(j, z) for W columns from j on; past the end z is -inf, which is never kept.
  template <class F>
  void each(int64_t begin, int64_t end, const F& f) const {
    int64_t j = begin;
    for (; j + W <= end; j += W) f(j, scaled(load(x + j)));
    if (j == end) return;
    alignas(64) float rest[W];
    for (int i = 0; i < W; ++i) rest[i] = j + i < end ? widen(x[j + i]) : -INF;
    f(j, scaled(load(rest)));
  }
  template <class F>
  void each(const F& f) const {
    each(0, vocab, f);
  }
  Floats scaled(Floats logits) const { return divides ? logits / temperature : logits; }
};

// --- weights ---------------------------------------------------------------------------------------------------------

struct Count {
  double top_k;

  Floats operator()(Floats) const { return splat(1); }
  double total(const float*, int64_t count) const { return double(count); }
  double kept(double) const { return top_k; }
  // The limit on the weight of the buffer's entries under the pivot, given the weights below the buffer, in it and
  // above it.
  double limit(double, double within, double above) const { return within + above - top_k; }
};

struct Mass {
  float maximum;
  double top_p;

  Floats operator()(Floats z) const { return exp_floored(larger(splat(EXP_FLOOR), z - maximum)); }
  double total(const float* z, int64_t count) const {
    Doubles sums{};
    int64_t i = 0;
    for (; i + W <= count; i += W) sums += __builtin_convertvector((*this)(load(z + i)), Doubles);
    double found = sum(sums);
    for (; i < count; ++i) found += (*this)(splat(z[i]))[0];
    return found;
  }
  double kept(double all) const { return all * top_p; }
  double limit(double below, double within, double above) const {
    return (1.0 - top_p) * (below + within + above) - below;
  }
};

// --- the pivot -------------------------------------------------------------------------------------------------------

struct Bracket {
  float low, high;  // low <= z < high
};

// The levels around the pivot, or next to it if the pivot is within rounding of a level.
template <class R, class Weight>
Bracket levels_around(const R& row, float maximum, const Weight& weight) {
  std::array<double, DEPTHS.size() + 1> above{};
  std::array<Floats, DEPTHS.size()> levels;
  for (size_t i = 0; i < DEPTHS.size(); ++i) levels[i] = splat(maximum - DEPTHS[i]);
  for (int64_t begin = 0; begin < row.vocab; begin += SEGMENT) {
    std::array<Floats, DEPTHS.size() + 1> sums{};
    row.each(begin, std::min(begin + SEGMENT, row.vocab), [&](int64_t, Floats z) {
      const Floats w = weight(z);
      for (size_t i = 0; i < DEPTHS.size(); ++i) sums[i] += where(z >= levels[i], w);
      sums[DEPTHS.size()] += w;
    });
    for (size_t i = 0; i < above.size(); ++i) above[i] += sum(sums[i]);
  }
  const double kept = weight.kept(above.back());
  size_t i = 0;
  while (i < DEPTHS.size() && above[i] < kept) ++i;
  return {i < DEPTHS.size() ? levels[i][0] : LOWEST, i > 0 ? levels[i - 1][0] : INF};
}

struct Gathered {
  int64_t count;
  double below, above;
};

// Copy the bracket's entries, and sum the weights below it (from `lowest` on) and above it.
template <class R, class Weight>
Gathered gather(const R& row, float lowest, Bracket bracket, const Weight& weight, float* out) {
  Doubles below{}, above{};
  int64_t count = 0;
  row.each([&](int64_t, Floats z) {
    const Floats w = weight(z);
    below += __builtin_convertvector(where((z < bracket.low) & (z >= lowest), w), Doubles);
    above += __builtin_convertvector(where(z >= bracket.high, w), Doubles);
    count += append((z >= bracket.low) & (z < bracket.high), z, out + count);
  });
  return {count, sum(below), sum(above)};
}

struct Pivot {
  float z;
  int64_t ties;
  double below;  // the weight of the entries below it
};

// The pivot of z[0..count), not empty; z is overwritten.
template <class Weight>
Pivot select(float* z, int64_t count, double limit, const Weight& weight) {
  constexpr int64_t BLOCK = 256;
  std::array<double, 1 << BITS> histogram;
  alignas(64) std::array<float, BLOCK> weights;
  double below = 0;
  while (true) {
    uint32_t low = ~0u, high = 0;
    for (int64_t i = 0; i < count; ++i) low = std::min(low, order(z[i])), high = std::max(high, order(z[i]));
    if (low == high) return {z[0], count, below};
    const int shift = std::max(0, 32 - std::countl_zero(high - low) - BITS);
    const uint32_t buckets = ((high - low) >> shift) + 1;
    std::fill(histogram.begin(), histogram.begin() + buckets, 0.0);
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
      const int64_t size = std::min(BLOCK, count - begin);
      for (int64_t i = 0; i < size; i += W) store(&weights[i], weight(load(z + begin + i)));  // `z` has room for W more
      for (int64_t i = 0; i < size; ++i) histogram[(order(z[begin + i]) - low) >> shift] += weights[i];
    }
    // Rounding may make the limit equal to the total weight: the last bucket is never dropped.
    uint32_t chosen = 0;
    double before = below;
    for (uint32_t bucket = 0; bucket < buckets; ++bucket) {
      if (histogram[bucket] == 0) continue;
      chosen = bucket, before = below;
      below += histogram[bucket];
      if (below > limit) break;
    }
    below = before;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float value = z[i];
      z[kept] = value;
      kept += (order(value) - low) >> shift == chosen;
    }
    count = kept;
  }
}

struct Cut {
  float pivot = LOWEST;
  int64_t dropped = 0;  // how many of the first entries equal to the pivot are dropped
};

// The cut by one kind of weight among the entries >= `lowest`.
template <class R, class Weight>
Cut cut(const R& row, float lowest, float maximum, const Weight& weight, float* buffer) {
  const Bracket all = {lowest, INF};
  const Bracket bracket = lowest == LOWEST ? levels_around(row, maximum, weight) : all;
  Gathered found = gather(row, lowest, bracket, weight, buffer);
  double within = weight.total(buffer, found.count);
  double limit = weight.limit(found.below, within, found.above);
  if (limit < 0 || limit >= within) {
    found = gather(row, lowest, all, weight, buffer);
    within = weight.total(buffer, found.count);
    limit = weight.limit(0, within, 0);
  }
  const Pivot pivot = select(buffer, found.count, limit, weight);
  const double ties = std::floor((limit - pivot.below) / weight(splat(pivot.z))[0]);
  return {pivot.z, int64_t(std::clamp(ties, 0.0, double(pivot.ties - 1)))};
}

// The smallest float32 that is at least this.
inline float rounded_up(double bound) {
  const float nearest = float(std::max(bound, double(LOWEST)));
  return nearest < bound ? std::nextafter(nearest, INF) : nearest;
}

// The cut of top-k (0 = off), then top-p (1 = off), then min-p (-inf = off), for a row with a finite maximum.
template <class R>
Cut choose(const R& row, float maximum, int64_t top_k, double top_p, double log_min_p) {
  thread_local std::vector<float> buffer;
  buffer.resize(row.vocab + 2 * W);
  Cut found;
  if (top_k > 0 && top_k < row.vocab)
    found.pivot = cut(row, LOWEST, maximum, Count{double(top_k)}, buffer.data()).pivot;
  if (top_p < 1) found = cut(row, found.pivot, maximum, Mass{maximum, top_p}, buffer.data());
  const float bound = rounded_up(double(maximum) + log_min_p);
  return bound > found.pivot ? Cut{bound, 0} : found;
}

// Computes how many entries the cut keeps, and the first column whose entry is kept if it equals the pivot.
template <class R>
void count_kept(const R& row, Cut cut, int64_t* count, int32_t* first) {
  Ints kept{};
  int64_t seen = 0, column = 0;
  row.each([&](int64_t j, Floats z) {
    kept -= z >= cut.pivot;
    if (seen >= cut.dropped) return;
    for (uint32_t ties = bits(z == cut.pivot); ties != 0 && seen < cut.dropped; ties &= ties - 1, ++seen)
      column = j + std::countr_zero(ties) + 1;
  });
  *count = int64_t(sum(kept)) - cut.dropped;
  *first = int32_t(column);
}

// The largest z; -inf for an empty row, NaN for a row with a NaN.
template <class T, bool divides>
float largest(const Row<T, divides>& row) {
  Floats found = splat(-INF);
  Ints nan{};
  Row<T, false>{row.x, row.vocab, 1}.each([&](int64_t, Floats x) {
    nan |= x != x;
    found = larger(x, found);
  });
  if (bits(nan) != 0) return QUIET_NAN;
  float x = -INF;
  for (int i = 0; i < W; ++i) x = std::max(x, found[i]);
  return divides ? x / row.temperature : x;  // rounding keeps the order
}

}  // namespace fastrl::search
