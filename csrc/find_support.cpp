// The C interface of `find_support` (fastrl/backend/contract.py); rows are distributed over torch's own threads.
#include "find_support.h"

#include "parallel.h"

namespace {

using namespace fastrl;
using namespace fastrl::search;

// Mirrors `_Search` in fastrl/backend/cpp/find_support.py, field by field.
struct Search {
  const void* logits;  // (a, b, vocab), strides in elements
  int64_t a, b, vocab, stride_a, stride_b, top_k;
  double temperature, top_p, log_min_p;
  float* pivots;    // (rows,): the entries above it are kept,
  int32_t* firsts;  // (rows,): and those equal to it from this column on
  int64_t* counts;  // (rows,): the number of entries kept, or an error code of the row
  int32_t element, threads;
};

constexpr int64_t WITH_NAN = -1, WITH_INFINITY = -2, EMPTY = -3;

// Call f(row, row number) for every row of logits, in torch's threads.
template <class F>
int32_t for_rows(const Search& s, const F& f) {
  const auto with_element = [&](auto element) {
    using T = decltype(element);
    return for_each(s.a * s.b, 1, s.threads, [&](int64_t number) {
      const T* x = (const T*)s.logits + number / s.b * s.stride_a + number % s.b * s.stride_b;
      const float temperature = float(s.temperature);
      if (temperature == 1) {
        f(Row<T, false>{x, s.vocab, 1}, number);
      } else {
        f(Row<T, true>{x, s.vocab, temperature}, number);
      }
    });
  };
  switch (s.element) {
    case 0: return with_element(float{});
    case 1: return with_element(BFloat16{});
    case 2: return with_element(Float16{});
    default: return 1;
  }
}

}  // namespace

extern "C" {

// Fills pivots, firsts and counts. Returns 0, or an error code.
int32_t fastrl_find_support_choose(const Search* search) {
  const Search& s = *search;
  return for_rows(s, [&](const auto& row, int64_t number) {
    const float maximum = largest(row);
    int64_t* count = s.counts + number;
    if (std::isfinite(maximum)) {
      const Cut cut = choose(row, maximum, s.top_k, s.top_p, s.log_min_p);
      s.pivots[number] = cut.pivot;
      count_kept(row, cut, count, s.firsts + number);
    } else {
      *count = maximum == INF ? WITH_INFINITY : maximum == -INF ? EMPTY : WITH_NAN;
    }
  });
}

// Writes the columns of the kept entries, those of row i from token_ids + offsets[i] on.
int32_t fastrl_find_support_write(const Search* search, const int64_t* offsets, int32_t* token_ids) {
  const Search& s = *search;
  return for_rows(s, [&](const auto& row, int64_t number) {
    const float pivot = s.pivots[number];
    const int32_t first = s.firsts[number];
    int32_t* out = token_ids + offsets[number];
    Ints lanes;
    for (int i = 0; i < W; ++i) lanes[i] = i;
    row.each([&](int64_t j, Floats z) {
      const Ints equal_and_kept = (z == pivot) & (lanes + int32_t(j) >= first);
      out += append_columns((z > pivot) | equal_and_kept, j, out);
    });
  });
}
}
