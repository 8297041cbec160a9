// The functions over pairs of logits of fastrl/backend/contract.py for one row of both: the student's p, the teacher's
// q. Both rows are read into float32 by segments, so that the arithmetic is compiled for no combination of types.
//
// A lane's columns, a sum's grouping and the order in which groups are folded depend only on V, as in rows.h.
#pragma once

#include <array>
#include <vector>

#include "rows.h"

namespace fastrl {

enum class Kind : int32_t { FORWARD_KL, REVERSE_KL, JSD };

// The logits of one side, contiguous (rows, vocab). Packed by fastrl/backend/cpp/pair.py.
struct Side {
  const void* logits;
  TransformArguments transform;
  int32_t element;
};

// One row of one side.
struct SideRow {
  const Side& side;
  int64_t row, vocab;

  // Call f(first logit, transform).
  template <class F>
  void with(const F& f) const {
    dispatch(side.element, side.transform.softcap, [&](auto element, auto softcap) {
      using Z = Transform<decltype(softcap)::value>;
      f((const decltype(element)*)side.logits + row * vocab, Z(side.transform, row));
      return 0;
    });
  }

  // Fetch what the next row has in W columns from this one on, into the second-level cache. Harmless past the end.
  void prefetch_next(int64_t column) const {
    const int64_t size = side.element == 0 ? 4 : 2;
    __builtin_prefetch((const char*)side.logits + ((row + 1) * vocab + column) * size, 0, 2);
  }

  float maximum() const {
    float found, slope;
    with([&](auto* x, auto transform) { found = transform.shifted(row_maximum(x, vocab), 0.0f, &slope); });
    return found;
  }

  // t = z - shift of the columns [begin, begin + count), then z = -inf up to the next multiple of W; and, if `slopes`
  // is not null, the slopes of the tanh.
  void read(int64_t begin, int64_t count, float shift, float* t, float* slopes = nullptr) const {
    with([&](auto* x, auto transform) {
      const auto take = [&](Floats logits, int64_t j) {
        Floats slope = splat(1.0f);
        store(t + j, transform.shifted(logits, shift, &slope));
        if (slopes != nullptr) store(slopes + j, slope);
      };
      int64_t j = 0;
      for (; j + W <= count; j += W) take(load(x + begin + j), j);
      if (j == count) return;
      Floats tail = splat(-INF);
      for (int64_t i = j; i < count; ++i) tail[i - j] = widen(x[begin + i]);
      take(tail, j);
    });
  }
};

constexpr int64_t PREFETCHED_VOCAB = 1 << 16;  // longer rows leave no room in the second-level cache for the next ones

struct PairStatistics {
  double divergence, student_kl, maximum, log_sum, teacher_maximum, teacher_log_sum;
};

// Per column of a row, p and q up to a factor each, and d = log(q / p) up to a summand, for the sweeps after the sums.
// q is not needed for the reverse KL, d not for the forward KL.
struct KeptPair {
  std::vector<float> p, q, d;

  void resize(Kind kind, int64_t vocab) {
    p.resize(size_t(vocab + W));
    if (kind != Kind::REVERSE_KL) q.resize(size_t(vocab + W));
    if (kind != Kind::FORWARD_KL) d.resize(size_t(vocab + W));
  }
};

using Lanes = std::array<double, W>;

inline void add(Lanes& sums, Floats x) {
  for (int i = 0; i < W; ++i) sums[size_t(i)] += double(x[i]);
}

// log(p / m) and log(q / m), m = beta q + (1 - beta) p, given d = log(q / p), finite. They cancel nowhere, and are
// exactly 0 for d = 0.
struct Mixture {
  float beta;

  struct LogRatios {
    Floats p, q;
  };
  LogRatios operator()(Floats d) const {
    const Floats up = larger(d, Floats{}), down = smaller(d, Floats{});
    const Floats ratio = exp_floored(larger(splat(EXP_FLOOR), down - up));  // of the smaller of p and q to the larger
    Floats log_m;                                                           // relative to the larger
    if (beta == 0.5f) {
      // m / larger = (1 + ratio) / 2 = (1 - x) / (1 + x): a third of a logarithm's work
      log_m = -twice_atanh((1.0f - ratio) / (3.0f + ratio));
    } else {
      const Floats weight = d < 0.0f ? splat(beta) : splat(1.0f - beta);  // of the smaller
      log_m = log_positive(1.0f - weight * (1.0f - ratio));
    }
    return {-up - log_m, down - log_m};
  }
};

// A bound for d where p or q is 0, of which 0 times is 0.
inline Floats bounded(Floats d) { return smaller(larger(d, splat(-1e30f)), splat(1e30f)); }

// The gradient's scalars and formula.
template <Kind kind>
struct PairSlope {
  float factor;  // c dz/dx without the slope of the tanh, and what turns the p's below into probabilities
  float ratio;   // FORWARD_KL: what turns the q's into multiples of the same unit as the p's
  float shift;   // REVERSE_KL: D plus the summand that d lacks; JSD: KL(p||m)

  // For JSD, q is p log(p / m).
  Floats operator()(Floats p, Floats q, Floats d) const {
    if constexpr (kind == Kind::FORWARD_KL) return (p - q * ratio) * factor;
    if constexpr (kind == Kind::REVERSE_KL) return p > 0.0f ? p * (d + shift) * -factor : Floats{};
    return (q - p * shift) * factor;
  }
};

// Statistics of a row; `kept` is filled for `pair_slope_sweep`.
template <Kind kind>
PairStatistics pair_statistics(const SideRow& student, const SideRow& teacher, float beta, KeptPair* kept) {
  const int64_t vocab = student.vocab;
  kept->resize(kind, vocab);
  const bool prefetches = vocab <= PREFETCHED_VOCAB;  // in the last sweep over the row
  const float maximum = student.maximum(), teacher_maximum = teacher.maximum();
  const Floats floor = splat(EXP_FLOOR);
  alignas(64) float t[SEGMENT], u[SEGMENT];

  // p_sum and q_sum of e^t and e^u; weighted: of e^u (u - t), or with the reverse KL of e^t (u - t).
  Lanes p_sum{}, q_sum{}, weighted{};
  for (int64_t begin = 0; begin < vocab; begin += SEGMENT) {
    const int64_t count = std::min(SEGMENT, vocab - begin);
    student.read(begin, count, maximum, t);
    teacher.read(begin, count, teacher_maximum, u);
    Floats ps{}, qs{}, ws{};
    for (int64_t j = 0; j < count; j += W) {
      if (kind != Kind::JSD && prefetches) student.prefetch_next(begin + j), teacher.prefetch_next(begin + j);
      const Floats log_p = load(t + j), log_q = load(u + j), d = log_q - log_p;
      const Floats p = exp_floored(larger(floor, log_p)), q = exp_floored(larger(floor, log_q));
      ps += p;
      qs += q;
      store(&kept->p[begin + j], p);
      if constexpr (kind != Kind::REVERSE_KL) store(&kept->q[begin + j], q);
      if constexpr (kind != Kind::FORWARD_KL) store(&kept->d[begin + j], d);
      const Floats weight = kind == Kind::REVERSE_KL ? p : q;
      if constexpr (kind != Kind::JSD) ws += weight > 0.0f ? weight * d : Floats{};
    }
    add(p_sum, ps), add(q_sum, qs), add(weighted, ws);
  }
  const double p_total = Sums::fold(p_sum.data()), q_total = Sums::fold(q_sum.data());
  const double log_sum = std::log(p_total), teacher_log_sum = std::log(q_total);
  const double rest = log_sum - teacher_log_sum;  // log(q / p) = d + rest
  PairStatistics found{0, 0, maximum, log_sum, teacher_maximum, teacher_log_sum};
  if constexpr (kind == Kind::JSD) {
    const Mixture log_ratios{beta};
    Lanes student_sum{}, teacher_sum{};
    for (int64_t begin = 0; begin < vocab; begin += SEGMENT) {
      Floats student_part{}, teacher_part{};
      for (int64_t j = begin; j < std::min(begin + SEGMENT, vocab); j += W) {
        if (prefetches) student.prefetch_next(j), teacher.prefetch_next(j);
        const auto log_ratio = log_ratios(bounded(load(&kept->d[j]) + float(rest)));
        const Floats term = load(&kept->p[j]) * log_ratio.p;
        student_part += term;
        teacher_part += load(&kept->q[j]) * log_ratio.q;
        store(&kept->q[j], term);
      }
      add(student_sum, student_part), add(teacher_sum, teacher_part);
    }
    found.student_kl = Sums::fold(student_sum.data()) / p_total;
    found.divergence = beta * (Sums::fold(teacher_sum.data()) / q_total) + (1.0 - beta) * found.student_kl;
  } else {
    const double weighted_sum = Sums::fold(weighted.data());
    found.divergence = kind == Kind::FORWARD_KL ? weighted_sum / q_total + rest : -weighted_sum / p_total - rest;
  }
  if (found.divergence < 0) found.divergence = 0;
  if (rest != rest) found.divergence = QUIET_NAN;
  if constexpr (kind == Kind::REVERSE_KL) found.student_kl = found.divergence;
  return found;
}

// Where a row's gradient goes, in one of the element types.
struct GradientRow {
  const SideRow& student;
  void* out;  // (rows, vocab)
  int32_t element;

  template <class F>
  void with(const F& f) const {
    with_element(element, [&](auto kind) {
      f((decltype(kind)*)out + student.row * student.vocab);
      return 0;
    });
  }

  void fill(float value) const {
    with([&](auto* to) {
      std::remove_reference_t<decltype(*to)> narrowed;
      narrow(value, &narrowed);
      std::fill(to, to + student.vocab, narrowed);
    });
  }

  // Write a segment of gradients with respect to z. May overwrite the student's logits of these columns.
  void write(int64_t begin, int64_t count, float* g) const {
    if (student.side.transform.softcap != 0) {
      alignas(64) float unused[SEGMENT], slopes[SEGMENT];
      student.read(begin, count, 0.0f, unused, slopes);
      for (int64_t j = 0; j < count; j += W) store(g + j, load(g + j) * load(slopes + j));
    }
    with([&](auto* to) {
      int64_t j = 0;
      for (; j + W <= count; j += W) store(to + begin + j, load(g + j));
      for (; j < count; ++j) narrow(g[j], to + begin + j);
    });
  }
};

// Fill a row whose gradient is one number; otherwise returns false.
template <Kind kind>
bool fill_trivial(const PairStatistics& s, float c, const GradientRow& out) {
  if (c == 0) {
    out.fill(0.0f);
  } else if (s.divergence != s.divergence || (kind == Kind::REVERSE_KL && std::isinf(s.divergence))) {
    out.fill(QUIET_NAN);
  } else {
    return false;
  }
  return true;
}

template <Kind kind>
PairSlope<kind> pair_slope(const PairStatistics& s, float c, const SideRow& student, float beta) {
  const double factor = c * student.side.transform.logit_scale / student.side.transform.temperature_of(student.row);
  return {float(kind == Kind::JSD ? factor * (1.0 - beta) : factor), 1.0f, float(s.student_kl)};
}

// c dD/dlogits, after `pair_statistics` of the same row.
template <Kind kind>
void pair_gradient_of_kept(const PairStatistics& s, float c, float beta, const KeptPair& kept, const GradientRow& out) {
  if (fill_trivial<kind>(s, c, out)) return;
  const SideRow& student = out.student;
  PairSlope<kind> slope = pair_slope<kind>(s, c, student, beta);
  slope.factor = float(slope.factor * std::exp(-s.log_sum));
  slope.ratio = float(std::exp(s.log_sum - s.teacher_log_sum));
  if constexpr (kind == Kind::REVERSE_KL) slope.shift = float(s.student_kl + (s.log_sum - s.teacher_log_sum));
  alignas(64) float g[SEGMENT];
  for (int64_t begin = 0; begin < student.vocab; begin += SEGMENT) {
    const int64_t count = std::min(SEGMENT, student.vocab - begin);
    for (int64_t j = 0; j < count; j += W) {
      Floats q{}, d{};
      if constexpr (kind == Kind::REVERSE_KL) {
        d = load(&kept.d[begin + j]);
      } else {
        q = load(&kept.q[begin + j]);
      }
      store(g + j, slope(load(&kept.p[begin + j]), q, d));
    }
    out.write(begin, count, g);
  }
}

// c dD/dlogits from the statistics, for rows that may be a slice of the vocabulary.
template <Kind kind>
void pair_gradient(const SideRow& teacher, const PairStatistics& s, float c, float beta, const GradientRow& out) {
  if (fill_trivial<kind>(s, c, out)) return;
  const SideRow& student = out.student;
  const PairSlope<kind> slope = pair_slope<kind>(s, c, student, beta);
  const Mixture log_ratios{beta};
  const Floats floor = splat(EXP_FLOOR);
  const float log_sum = float(s.log_sum), teacher_log_sum = float(s.teacher_log_sum);
  alignas(64) float t[SEGMENT], u[SEGMENT];
  for (int64_t begin = 0; begin < student.vocab; begin += SEGMENT) {
    const int64_t count = std::min(SEGMENT, student.vocab - begin);
    student.read(begin, count, float(s.maximum), t);
    teacher.read(begin, count, float(s.teacher_maximum), u);
    for (int64_t j = 0; j < count; j += W) {
      const Floats log_p = load(t + j) - log_sum, log_q = load(u + j) - teacher_log_sum, d = log_q - log_p;
      const Floats p = exp_floored(larger(floor, log_p));
      Floats q{};
      if constexpr (kind == Kind::FORWARD_KL) q = exp_floored(larger(floor, log_q));
      if constexpr (kind == Kind::JSD) q = p * log_ratios(bounded(d)).p;
      store(t + j, slope(p, q, d));
    }
    out.write(begin, count, t);
  }
}

}  // namespace fastrl
