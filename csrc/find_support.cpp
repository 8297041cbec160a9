// The C interface of `find_support` (fastrl/backend/contract.py); rows are distributed over torch's own threads.
#include "find_support.h"

#include "arguments.h"
#include "parallel.h"

namespace {

using namespace fastrl;
using namespace fastrl::search;

// fastrl/backend/cpp/support.py packs this, field by field.
struct Search {
  Tile logits;
  int64_t top_k;
  double temperature, top_p, log_min_p;
  float* pivots;    // (rows,): the entries above it are kept,
  int32_t* firsts;  // (rows,): and those equal to it from this column on
  int64_t* counts;  // (rows,): the number of entries kept, or an error code of the row
};

constexpr int64_t WITH_NAN = -1, WITH_INFINITY = -2, EMPTY = -3;

// Call f(row, row number) for every row of logits, in torch's threads.
template <class F>
int32_t for_rows(const Search& s, const F& f) {
  return with_element(s.logits.element, [&](auto element) {
    using T = decltype(element);
    return for_each(s.logits.count(), 1, s.logits.threads, [&](int64_t number) {
      const T* x = s.logits.at<T>(number);
      const float temperature = float(s.temperature);
      if (temperature == 1) {
        f(Row<T, false>{x, s.logits.vocab, 1}, number);
      } else {
        f(Row<T, true>{x, s.logits.vocab, temperature}, number);
      }
    });
  });
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
