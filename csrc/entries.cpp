// The entries that are asked for in each row: their logits, and their gradients. See fastrl/backend/contract.py.
#include "arguments.h"
#include "parallel.h"

namespace {

using namespace fastrl;

constexpr int64_t AHEAD = 4;  // a row's entries in a slice are too few for their cache misses to overlap

// fastrl/backend/cpp/support.py packs this, field by field.
struct Slice {
  Tile logits;
  int64_t first;           // the vocabulary entry of column 0
  const int64_t* rows;     // (a * b,): of `offsets`
  const int32_t* ids;      // (nnz,)
  const int64_t* offsets;  // (N + 1,)

  // Call each(i, row, logits of the row) for every row. Cache misses overlap with the work on the rows before.
  template <class T, class F>
  int32_t for_rows(const F& each) const {
    const int64_t count = logits.count(), block = block_of(count, logits.threads, 64);
    return for_each(count, block, logits.threads, [&](int64_t i) {
      if (i + AHEAD < count) prefetch(rows[i + AHEAD], logits.at<T>(i + AHEAD));
      each(i, rows[i], logits.at<T>(i));
    });
  }

  // The columns of a row's first entries.
  template <class T>
  void prefetch(int64_t row, const T* x) const {
    const int64_t end = std::min(offsets[row + 1], offsets[row] + 256);
    for_entries(offsets[row], end, [&](int64_t, int64_t column) { __builtin_prefetch(x + column); });
  }

  // Call each(k, column) for the entries in [start, end) that lie in the slice, in order. Few may, at random, so they
  // are first found without branches.
  template <class F>
  void for_entries(int64_t start, int64_t end, const F& each) const {
    constexpr int64_t STEP = 64;
    int32_t found[STEP];
    for (; start < end; start += STEP) {
      const int32_t step = std::min<int64_t>(STEP, end - start), hits = find(ids + start, step, found);
      for (int32_t h = 0; h < hits; ++h) each(start + found[h], ids[start + found[h]] - first);
    }
  }

  // Write the places of the ids that lie in the slice to `found` (count,); returns how many do.
  int32_t find(const int32_t* some, int32_t count, int32_t* found) const {
    int32_t hits = 0, j = 0;
#if defined(__AVX512F__)
    const __m512i begin = _mm512_set1_epi32(int32_t(first)), size = _mm512_set1_epi32(int32_t(logits.vocab));
    __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; j + W <= count; j += W) {
      const __mmask16 here = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(_mm512_loadu_si512(some + j), begin), size);
      _mm512_storeu_si512(found + hits, _mm512_maskz_compress_epi32(here, place));
      hits += __builtin_popcount(here);
      place = _mm512_add_epi32(place, _mm512_set1_epi32(W));
    }
#endif
    for (; j < count; ++j) {
      found[hits] = j;
      hits += uint32_t(some[j]) - uint32_t(first) < uint32_t(logits.vocab);
    }
    return hits;
  }
};

}  // namespace

extern "C" {

// Both functions return 0 or an error code.
int32_t fastrl_gather_entries(const Slice* arguments, float* values, int64_t* best_ids, float* best_values,
                              int64_t* targets) {
  const Slice& slice = *arguments;
  return with_element(slice.logits.element, [&](auto element) {
    using T = decltype(element);
    return slice.for_rows<T>([&](int64_t i, int64_t row, const T* x) {
      int64_t best = best_ids[row];
      float largest = best_values[row];
      slice.for_entries(slice.offsets[row], slice.offsets[row + 1], [&](int64_t k, int64_t column) {
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
  return with_element(slice.logits.element, [&](auto element) {
    using T = decltype(element);
    return slice.for_rows<T>([&](int64_t, int64_t row, T* out) {
      slice.for_entries(slice.offsets[row], slice.offsets[row + 1],
                        [&](int64_t k, int64_t column) { narrow(gradient[k], out + column); });
    });
  });
}
}
