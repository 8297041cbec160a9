// The row functions of fastrl/backend/contract.py for one row of logits: sweeps over the vocabulary, no allocation.
//
// A lane's columns, a sum's grouping and the order in which groups are folded depend only on V. So a row's results are
// bitwise the same at any position, stride or alignment and with any number of threads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "arguments.h"

namespace fastrl {

constexpr int64_t SEGMENT = 1024;  // columns summed in float32 before the sums are added to those in float64

// z = scale * x, or z = scale * tanh(inner * x), where x = -inf stays -inf. Only z - shift is ever computed.
template <bool softcap>
struct Transform {
  static constexpr bool has_softcap = softcap;
  float inner, scale;
  double slope;  // dz/dx, without the 1 - tanh^2 of a softcap

  Transform(const TransformArguments& s, int64_t row) : Transform(s.temperature_of(row), s.logit_scale, s.softcap) {}
  // a softcap of 0 means none
  Transform(double temperature, double logit_scale, double cap)
      : inner(softcap ? float(logit_scale / cap) : 1.0f),
        scale(float(softcap ? cap / temperature : logit_scale / temperature)),
        slope(logit_scale / temperature) {}

  Floats before_scale(Floats x, Floats* tanh_slope) const {
    if constexpr (!softcap) return x;
    const Tanh tanh = tanh_with_slope(x * inner);
    *tanh_slope = tanh.slope;
    return x == -INF ? x : tanh.value;
  }
  // z - shift with one rounding (a fused multiply-add if the machine has one), and the slope of the tanh
  Floats shifted(Floats x, float shift, Floats* tanh_slope) const {
    return before_scale(x, tanh_slope) * scale - shift;
  }
  // the same for one number, through the same instructions
  float shifted(float x, float shift, float* tanh_slope) const {
    Floats slopes = splat(1.0f);
    const Floats z = shifted(splat(x), shift, &slopes);
    *tanh_slope = slopes[0];
    return z[0];
  }
};

struct RowStatistics {
  float logprob, entropy, maximum, log_sum;
};

// The largest x, ignoring NaN; -inf if there is none.
template <class T>
float row_maximum(const T* x, int64_t vocab) {
  Floats m0 = splat(-INF), m1 = m0, m2 = m0, m3 = m0;
  int64_t j = 0;
  for (; j + 4 * W <= vocab; j += 4 * W) {
    m0 = larger(load(x + j), m0);
    m1 = larger(load(x + j + W), m1);
    m2 = larger(load(x + j + 2 * W), m2);
    m3 = larger(load(x + j + 3 * W), m3);
  }
  for (; j + W <= vocab; j += W) m0 = larger(load(x + j), m0);
  m0 = larger(larger(m0, m1), larger(m2, m3));
  float maximum = -INF;
  for (int i = 0; i < W; ++i) maximum = std::max(maximum, m0[i]);
  for (; j < vocab; ++j) maximum = widen(x[j]) > maximum ? widen(x[j]) : maximum;
  return maximum;
}

struct Sums {
  double exponentials[W] = {}, weighted[W] = {};  // of e^t and of t e^t, t = z - maximum, by lane

  static double fold(const double* lanes) {
    double halves[W];
    std::copy(lanes, lanes + W, halves);
    for (int width = W / 2; width; width /= 2)
      for (int i = 0; i < width; ++i) halves[i] += halves[i + width];
    return halves[0];
  }
};

// Add x[0..count) to the sums; count is a multiple of 2 W and at most SEGMENT. If `next` is not null, as many bytes
// from there on are prefetched into the cache. If `kept` is not null, it receives the e^t.
template <class T, class Z>
void add_segment(const T* x, int64_t count, const Z& transform, float maximum, Sums* sums, const char* next,
                 float* kept) {
  Floats s0{}, s1{}, w0{}, w1{}, unused;
  const Floats floor = splat(EXP_FLOOR);
  for (int64_t j = 0; j < count; j += 2 * W) {
    if (next != nullptr) {
      const char* line = next + j * int64_t(sizeof(T));  // harmless past the end of the row
      for (int offset = 0; offset < int(2 * W * sizeof(T)); offset += 64) __builtin_prefetch(line + offset, 0, 2);
    }
    const Floats t0 = larger(floor, transform.shifted(load(x + j), maximum, &unused));
    const Floats t1 = larger(floor, transform.shifted(load(x + j + W), maximum, &unused));
    const Floats e0 = exp_floored(t0), e1 = exp_floored(t1);
    if (kept != nullptr) {
      store(kept + j, e0);
      store(kept + j + W, e1);
    }
    s0 += e0;
    s1 += e1;
    w0 += t0 * e0;
    w1 += t1 * e1;
  }
  s0 += s1;
  w0 += w1;
  for (int i = 0; i < W; ++i) {
    sums->exponentials[i] += double(s0[i]);
    sums->weighted[i] += double(w0[i]);
  }
}

// Statistics of one row. A target outside [0, vocab) gives a NaN log-probability. `next`: the row to be read after this
// one, or null. `kept`: null, or room for kept_size(vocab) numbers e^(z - maximum); that at the target is arbitrary.
inline int64_t kept_size(int64_t vocab) { return vocab + 2 * W; }
template <class T, class Z>
RowStatistics row_statistics(const T* x, int64_t vocab, int64_t target, const Z& transform, const T* next,
                             float* kept = nullptr) {
  const bool valid = target >= 0 && target < vocab;
  const int64_t y = valid ? target : 0;
  const float largest = row_maximum(x, vocab);  // the transform is monotone
  float slope;
  const float maximum = transform.shifted(largest, 0.0f, &slope);

  // The sums over all entries but the target. Segments with the target or an incomplete end are summed from a copy with
  // -inf in those places.
  Sums sums;
  alignas(64) float copy[SEGMENT];
  for (int64_t begin = 0; begin < vocab; begin += SEGMENT) {
    const int64_t count = std::min(SEGMENT, vocab - begin);
    float* keep = kept != nullptr ? kept + begin : nullptr;
    const char* fetch = next != nullptr ? (const char*)(next + begin) : nullptr;
    if (count == SEGMENT && (y < begin || y >= begin + SEGMENT)) {
      add_segment(x + begin, count, transform, maximum, &sums, fetch, keep);
      continue;
    }
    int64_t j = 0;
    for (; j + W <= count; j += W) store(copy + j, load(x + begin + j));
    for (; j < count; ++j) copy[j] = widen(x[begin + j]);
    for (; j % (2 * W) != 0; ++j) copy[j] = -INF;
    if (y >= begin && y < begin + count) copy[y - begin] = -INF;
    add_segment(copy, j, transform, maximum, &sums, fetch, keep);
  }
  const double others = Sums::fold(sums.exponentials);

  const float x_y = widen(x[y]);
  const double u = transform.shifted(x_y, maximum, &slope);
  const double e_u = std::exp(u);
  // If the target is the maximum, log1p keeps the digits that a rounded sum 1 + others would lose. (u is then 0 or the
  // rounding error of the maximum.)
  const double log_sum = x_y == largest ? u + std::log1p(others * std::exp(-u)) : std::log(others + e_u);
  const double logprob = x_y == largest ? -std::log1p(others * std::exp(-u)) : u - log_sum;
  const double weighted = Sums::fold(sums.weighted) + (e_u > 0 ? u * e_u : e_u);
  const double difference = log_sum - weighted / (others + e_u);
  const double entropy = difference < 0 ? 0 : difference;  // below 0 it is the rounding of the float32 e^t
  const auto is_nan = [](T value) { return widen(value) != widen(value); };
  const bool empty = largest == -INF && std::none_of(x, x + vocab, is_nan);
  return {valid ? float(logprob) : QUIET_NAN, float(entropy), log_sum == log_sum || empty ? maximum : QUIET_NAN,
          float(log_sum)};
}

// Writes the gradient with respect to the logits, given c = dL/dlogp and h = dL/dH, to `out`, which may be `x`, and may
// be narrower where it is not. A row whose target is outside [0, vocab) is a slice of a vocabulary; a NaN
// log-probability makes the row NaN.
// `kept`, if not null, is as row_statistics filled it, which saves the second exponential.
template <class T, class Out, class Z>
void row_gradient(const T* x, int64_t vocab, int64_t target, const Z& transform, const RowStatistics& statistics,
                  float c, float h, Out* out, const float* kept = nullptr) {
  const bool here = target >= 0 && target < vocab, valid = statistics.logprob == statistics.logprob;
  if (!valid || (c == 0.0f && h == 0.0f && std::isfinite(statistics.log_sum))) {
    Out value;
    narrow(valid ? 0.0f : QUIET_NAN, &value);
    std::fill(out, out + vocab, value);
    return;
  }
  float slope;
  transform.shifted(widen(x[here ? target : 0]), 0.0f, &slope);
  // 1 - p_y is computed from the log-probability: p_y rounded to 1 would lose a confident token's gradient.
  const double log_p_y = statistics.logprob, p_y = std::exp(log_p_y), entropy = statistics.entropy;
  // At the target: slope (c (1 - p) - h p (log p + H)).
  const double from_entropy = p_y == 0 ? 0 : p_y * (log_p_y + entropy);
  const double at_target = transform.slope * slope * (c * -std::expm1(log_p_y) - h * from_entropy);

  // Elsewhere: slope p (-c - h (log p + H)) = e^a (factor + log_factor a), a = log p, or z - maximum if e^a is kept.
  const double log_sum_kept = kept != nullptr ? statistics.log_sum : 0.0, to_p = std::exp(-log_sum_kept);
  const float factor = float(-transform.slope * to_p * (c + h * (entropy - log_sum_kept)));
  const float log_factor = float(-transform.slope * to_p * h);
  const float maximum = statistics.maximum, log_sum = kept != nullptr ? 0.0f : statistics.log_sum;
  const Floats floor = splat(EXP_FLOOR);
  const auto sweep = [&](auto exponential) {
    const auto gradient = [&](Floats logits, int64_t j) {
      Floats tanh_slope;
      const Floats a = larger(floor, transform.shifted(logits, maximum, &tanh_slope) - log_sum);
      const Floats g = exponential(a, j) * (a * log_factor + factor);
      if constexpr (!Z::has_softcap) return g;
      return g * tanh_slope;
    };
    int64_t j = 0;
    for (; j + W <= vocab; j += W) store(out + j, gradient(load(x + j), j));
    if (j < vocab) {
      alignas(64) float tail[W] = {};
      for (int64_t i = j; i < vocab; ++i) tail[i - j] = widen(x[i]);
      store(tail, gradient(load(tail), j));
      for (int64_t i = j; i < vocab; ++i) narrow(tail[i - j], out + i);
    }
  };
  if (kept != nullptr) {
    sweep([&](Floats, int64_t j) { return load(kept + j); });
  } else {
    sweep([](Floats a, int64_t) { return exp_floored(a); });
  }
  if (here) narrow(float(at_target), out + target);
}

}  // namespace fastrl
