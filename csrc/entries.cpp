// The entries that are asked for in each row: their logits, and their gradients. See fastrl/backend/contract.py.
#include "parallel.h"
#include "vector.h"

namespace {

using namespace fastrl;

// Mirrors the struct of fastrl/backend/cpp/entries.py, field by field.
struct Slice {
  void* logits;  // (a, b, width), strides in elements
  int64_t a, b, width, stride_a, stride_b;
  int64_t first;            // the vocabulary entry of column 0
  const int64_t* rows;      // (a * b,): of `offsets`
  const int32_t* ids;       // (nnz,)
  const int64_t* offsets;   // (N + 1,)
  int32_t element, threads;

  // Call each(i, row, logits of the row) for every row. The cache misses of the next row's entries overlap with its work.
  template <class T, class F>
  int32_t for_rows(const F& each) const {
    const int64_t count = a * b, block = std::max<int64_t>(1, std::min<int64_t>(64, count / (8 * int64_t(threads))));
    const auto at = [&](int64_t i) { return (T*)logits + i / b * stride_a + i % b * stride_b; };
    return for_each(count, block, threads, [&](int64_t i) {
      if (i + 1 < count) prefetch(rows[i + 1], at(i + 1));
      each(i, rows[i], at(i));
    });
  }

  // The columns of a row's first entries; those outside the slice stand for its ends.
  template <class T>
  void prefetch(int64_t row, const T* x) const {
    const int64_t end = std::min(offsets[row + 1], offsets[row] + 256);
    for (int64_t k = offsets[row]; k < end; ++k) {
      __builtin_prefetch(x + std::min(std::max<int64_t>(ids[k] - first, 0), width - 1));
    }
  }

  // Call each(k, column) for the entries of a row that lie in the slice, in order. Few may, at random, so they are first
  // found without branches.
  template <class F>
  void for_entries(int64_t row, const F& each) const {
    constexpr int64_t STEP = 64;
    int32_t found[STEP];
    const int64_t end = offsets[row + 1];
    for (int64_t start = offsets[row]; start < end; start += STEP) {
      const int32_t step = std::min<int64_t>(STEP, end - start);
      int32_t hits = 0;
      for (int32_t j = 0; j < step; ++j) {
        found[hits] = j;
        hits += uint64_t(ids[start + j] - first) < uint64_t(width);
      }
      for (int32_t h = 0; h < hits; ++h) each(start + found[h], ids[start + found[h]] - first);
    }
  }
};

}  // namespace

extern "C" {

// Both functions return 0 or an error code.
int32_t fastrl_gather_entries(const Slice* arguments, float* values, int64_t* best_ids, float* best_values,
                              int64_t* targets) {
  const Slice& slice = *arguments;
  return with_element(slice.element, [&](auto element) {
    using T = decltype(element);
    return slice.for_rows<T>([&](int64_t i, int64_t row, const T* x) {
      int64_t best = best_ids[row];
      float largest = best_values[row];
      slice.for_entries(row, [&](int64_t k, int64_t column) {
        const int64_t id = slice.ids[k];
        const float value = values[k] = widen(x[column]);
        if (value == value && (best < 0 || value > largest || (value == largest && id < best))) {
          best = id;
          largest = value;
        }
      });
      targets[i] = best == best_ids[row] ? -1 : best - slice.first;
      best_ids[row] = best;
      best_values[row] = largest;
    });
  });
}

int32_t fastrl_scatter_entries(const Slice* arguments, const float* gradient) {
  const Slice& slice = *arguments;
  return with_element(slice.element, [&](auto element) {
    using T = decltype(element);
    return slice.for_rows<T>([&](int64_t, int64_t row, T* out) {
      slice.for_entries(row, [&](int64_t k, int64_t column) { narrow(gradient[k], out + column); });
    });
  });
}
}
