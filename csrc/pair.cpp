// The C interface of pair.h: rows distributed over torch's threads.
#include "pair.h"

#include "parallel.h"

extern "C" int32_t fastrl_advise(void* begin, int64_t bytes);  // rows.cpp

namespace {

using namespace fastrl;

// fastrl/backend/cpp/pair.py packs this, field by field.
struct Pair {
  Side student, teacher;
  int64_t rows, vocab;
  double beta;
  int32_t kind;
  int32_t threads;
  const float* c;     // (rows,); null: statistics only
  void* out;          // (rows, vocab); may be the student's logits
  float* statistics;  // (6, rows), in the order of the contract's PairStatistics
  int32_t out_element;

  PairStatistics known(int64_t row) const {
    const auto at = [&](int64_t i) { return double(statistics[i * rows + row]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5)};
  }
  void write(int64_t row, const PairStatistics& s) const {
    const double numbers[] = {s.divergence, s.student_kl, s.maximum, s.log_sum, s.teacher_maximum, s.teacher_log_sum};
    for (int64_t i = 0; i < 6; ++i) statistics[i * rows + row] = float(numbers[i]);
  }
};

constexpr int64_t BLOCK_ENTRIES = 1 << 18;  // of the rows that a thread takes at a time

// Call f<kind>(student's row, teacher's row, gradient) for every row.
template <class F>
int32_t for_pairs(const Pair& pair, const F& f) {
  const int64_t block = block_of(pair.rows, pair.threads, BLOCK_ENTRIES / pair.vocab, GRAIN / pair.vocab);
  const auto all = [&](auto kind) {
    return for_each(pair.rows, block, pair.threads, [&](int64_t row) {
      const SideRow student{pair.student, row, pair.vocab}, teacher{pair.teacher, row, pair.vocab};
      f(kind, student, teacher, GradientRow{student, pair.out, pair.out_element});
    });
  };
  switch (Kind(pair.kind)) {
    case Kind::FORWARD_KL: return all(std::integral_constant<Kind, Kind::FORWARD_KL>{});
    case Kind::REVERSE_KL: return all(std::integral_constant<Kind, Kind::REVERSE_KL>{});
    case Kind::JSD: return all(std::integral_constant<Kind, Kind::JSD>{});
    default: return 1;
  }
}

void advise(const Pair& pair) {
  if (pair.out != pair.student.logits) {
    fastrl_advise(pair.out, pair.rows * pair.vocab * (pair.out_element == 0 ? int64_t(4) : int64_t(2)));
  }
}

}  // namespace

extern "C" {

// All functions here return 0 or an error code.
int32_t fastrl_pair_forward_gradient(const Pair* arguments) {
  const Pair& pair = *arguments;
  if (pair.c != nullptr) advise(pair);
  return for_pairs(pair, [&](auto kind, const SideRow& student, const SideRow& teacher, const GradientRow& out) {
    thread_local KeptPair kept;
    const float beta = float(pair.beta);
    const PairStatistics found = pair_statistics<decltype(kind)::value>(student, teacher, beta, &kept);
    if (pair.c != nullptr) pair_gradient_of_kept<decltype(kind)::value>(found, pair.c[student.row], beta, kept, out);
    pair.write(student.row, found);
  });
}

int32_t fastrl_pair_gradient(const Pair* arguments) {
  const Pair& pair = *arguments;
  advise(pair);
  return for_pairs(pair, [&](auto kind, const SideRow& student, const SideRow& teacher, const GradientRow& out) {
    const int64_t row = student.row;
    pair_gradient<decltype(kind)::value>(teacher, pair.known(row), pair.c[row], float(pair.beta), out);
  });
}
}
