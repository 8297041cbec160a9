// Rows that keep a few vocabulary entries each: their logits and gradients. See fastrl/backend/contract.py.
#include <vector>

#include "objective.h"
#include "parallel.h"

namespace {

using namespace fastrl;

// fastrl/backend/cpp/support.py packs the structs, field by field.
struct Support {
  const int32_t* ids;      // (nnz,), ascending within a row
  const int64_t* offsets;  // (rows + 1,)
  const uint8_t* valid;    // (rows,)
  int64_t rows;
  int32_t threads;

  bool takes_part(int64_t row) const { return valid[row] && offsets[row] < offsets[row + 1]; }
  // Call each(row) for every row, a few rows at a time.
  template <class F>
  int32_t for_rows(const F& each) const {
    return for_each(rows, block_of(rows, threads, 64), threads, each);
  }
};

struct Factors {
  const void *hidden, *weight, *bias;  // (N, width), (V, width), (V,) or null
  int64_t hidden_stride, weight_stride, width;
  int32_t element;
};

struct RowArguments {
  const int64_t* targets;
  TransformArguments transform;
};

struct ByToken {
  const int32_t* ids;      // (count,), ascending; those >= `vocab` take no part
  const int64_t* entries;  // (count,)
  const int32_t* rows;     // (count,)
  int64_t count, vocab;
  int32_t threads, add;
};

template <class T>
void prefetch_row(const T* row, int64_t width) {
  constexpr int64_t MOST = 8192;  // bytes; beyond that, the hardware's own prefetcher has caught up
  const int64_t bytes = std::min<int64_t>(width * int64_t(sizeof(T)), MOST);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i, 0, 2);
}

template <class T>
float dot(const T* a, const T* b, int64_t width) {
  Floats s0{}, s1{}, s2{}, s3{};
  int64_t j = 0;
  for (; j + 4 * W <= width; j += 4 * W) {
    s0 += load(a + j) * load(b + j);
    s1 += load(a + j + W) * load(b + j + W);
    s2 += load(a + j + 2 * W) * load(b + j + 2 * W);
    s3 += load(a + j + 3 * W) * load(b + j + 3 * W);
  }
  for (; j + W <= width; j += W) s0 += load(a + j) * load(b + j);
  s0 = (s0 + s1) + (s2 + s3);
  double total = 0;
  for (int i = 0; i < W; ++i) total += double(s0[i]);
  for (; j < width; ++j) total += double(widen(a[j])) * double(widen(b[j]));
  return float(total);
}

// total += factor * x
template <class T>
void add_multiple(float* total, float factor, const T* x, int64_t width) {
  int64_t j = 0;
  for (; j + W <= width; j += W) store(total + j, load(total + j) + factor * load(x + j));
  for (; j < width; ++j) total[j] += factor * widen(x[j]);
}

template <class T>
void write_row(const float* total, int64_t width, T* out) {
  int64_t j = 0;
  for (; j + W <= width; j += W) store(out + j, load(total + j));
  for (; j < width; ++j) narrow(total[j], out + j);
}

// The index of the target among a row's entries; -1 if the row does not keep its target.
int64_t place(const int32_t* ids, int64_t count, int64_t target) {
  const int32_t* found = std::lower_bound(ids, ids + count, target);
  return found != ids + count && *found == target ? found - ids : -1;
}

// Call f(row, offset of its logits, their count, index of the target, transform) for every row that takes part, and
// otherwise(row) for the others.
template <class F, class G>
int32_t for_logits(const Support& support, const RowArguments& rows, const F& f, const G& otherwise) {
  const auto with_softcap = [&](auto softcap) {
    return support.for_rows([&](int64_t row) {
      if (!support.takes_part(row)) return otherwise(row);
      const int64_t begin = support.offsets[row], count = support.offsets[row + 1] - begin;
      const Transform<decltype(softcap)::value> transform(rows.transform, row);
      f(row, begin, count, place(support.ids + begin, count, rows.targets[row]), transform);
    });
  };
  return rows.transform.softcap != 0 ? with_softcap(std::true_type{}) : with_softcap(std::false_type{});
}

}  // namespace

extern "C" {

// values (nnz,): the support logits, 0 in rows that take no part. All functions here return 0 or an error code.
int32_t fastrl_support_products(const Support* arguments, const Factors* factors, float* values) {
  const Support& support = *arguments;
  const Factors& f = *factors;
  return with_element(f.element, [&](auto element) {
    using T = decltype(element);
    const T *weight = (const T*)f.weight, *bias = (const T*)f.bias;
    return support.for_rows([&](int64_t row) {
      const int64_t begin = support.offsets[row], end = support.offsets[row + 1];
      if (!support.takes_part(row)) return (void)std::fill(values + begin, values + end, 0.0f);
      const T* hidden = (const T*)f.hidden + row * f.hidden_stride;
      for (int64_t k = begin; k < end; ++k) {
        if (k + 1 < support.offsets[support.rows]) prefetch_row(weight + support.ids[k + 1] * f.weight_stride, f.width);
        const float product = dot(hidden, weight + support.ids[k] * f.weight_stride, f.width);
        values[k] = bias == nullptr ? product : product + widen(bias[support.ids[k]]);
      }
    });
  });
}

// statistics: (4, rows), in the order of the contract's Statistics
int32_t fastrl_support_statistics(const Support* support, const RowArguments* rows, const float* values,
                                  float* statistics) {
  const auto write = [&](int64_t row, const RowStatistics& found) {
    float* out = statistics + row;
    const int64_t n = support->rows;
    out[0] = found.logprob, out[n] = found.entropy, out[2 * n] = found.maximum, out[3 * n] = found.log_sum;
  };
  return for_logits(
      *support, *rows,
      [&](int64_t row, int64_t begin, int64_t count, int64_t target, const auto& transform) {
        write(row, row_statistics(values + begin, count, target, transform, (const float*)nullptr));
      },
      [&](int64_t row) { write(row, RowStatistics{}); });
}

// `out` (nnz,) may be `values`; `h` may be null
int32_t fastrl_support_gradient(const Support* support, const RowArguments* rows, const float* values,
                                const float* const* statistics, const float* c, const float* h, float* out) {
  return for_logits(
      *support, *rows,
      [&](int64_t row, int64_t begin, int64_t count, int64_t target, const auto& transform) {
        const RowStatistics found{statistics[0][row], statistics[1][row], statistics[2][row], statistics[3][row]};
        row_gradient(values + begin, count, target, transform, found, c[row], h == nullptr ? 0.0f : h[row],
                     out + begin);
      },
      [&](int64_t row) { std::fill(out + support->offsets[row], out + support->offsets[row + 1], 0.0f); });
}

// `out` of the loss (nnz,) may be `values`
int32_t fastrl_support_forward_gradient(const Support* support, const RowArguments* rows, const float* values,
                                        const LossArguments* loss) {
  float* out = (float*)loss->out;
  return for_logits(
      *support, *rows,
      [&](int64_t row, int64_t begin, int64_t count, int64_t target, const auto& transform) {
        const RowStatistics found = row_statistics(values + begin, count, target, transform, (const float*)nullptr);
        const LossArguments::Terms terms = loss->run(row, found);
        row_gradient(values + begin, count, target, transform, found, float(terms[LossArguments::TERMS]),
                     float(terms[LossArguments::TERMS + 1]), out + begin);
        loss->write(row, support->rows, found, terms);
      },
      [&](int64_t row) {
        std::fill(out + support->offsets[row], out + support->offsets[row + 1], 0.0f);
        loss->write(row, support->rows, RowStatistics{}, LossArguments::Terms{});
      });
}

// Sets `logits` (n, width), entries [first, first + width) of the given rows, to -inf outside the rows' supports
int32_t fastrl_support_restrict(const Support* support, const int64_t* rows, int64_t n, void* logits, int64_t width,
                                int64_t stride, int64_t first, int64_t element) {
  return with_element(int32_t(element), [&](auto zero) {
    using T = decltype(zero);
    T nothing;
    narrow(-INF, &nothing);
    return for_each(n, 1, support->threads, [&](int64_t i) {
      const int32_t *id = support->ids + support->offsets[rows[i]], *end = support->ids + support->offsets[rows[i] + 1];
      if (id == end) return;
      T* row = (T*)logits + i * stride;
      int64_t column = 0;
      for (id = std::lower_bound(id, end, first); id != end && *id < first + width; ++id) {
        std::fill(row + column, row + (*id - first), nothing);
        column = *id - first + 1;
      }
      std::fill(row + column, row + width, nothing);
    });
  });
}

// Writes the rows of `out` (rows, width) that take part: sum_k gradient_k weight[id_k]
int32_t fastrl_support_hidden(const Support* arguments, const Factors* factors, const float* gradient, void* out,
                              int64_t out_stride) {
  const Support& support = *arguments;
  const Factors& f = *factors;
  return with_element(f.element, [&](auto element) {
    using T = decltype(element);
    const T* weight = (const T*)f.weight;
    return support.for_rows([&](int64_t row) {
      if (!support.takes_part(row)) return;
      thread_local std::vector<float> total;
      total.assign(f.width, 0.0f);
      for (int64_t k = support.offsets[row]; k < support.offsets[row + 1]; ++k) {
        if (k + 1 < support.offsets[support.rows]) prefetch_row(weight + support.ids[k + 1] * f.weight_stride, f.width);
        add_multiple(total.data(), gradient[k], weight + support.ids[k] * f.weight_stride, f.width);
      }
      write_row(total.data(), f.width, (T*)out + row * out_stride);
    });
  });
}

// Writes the rows of `out` (V, width) and entries of `out_bias` (V,) whose token has an entry; either may be null
int32_t fastrl_support_weight(const ByToken* arguments, const Factors* factors, const float* gradient, void* out,
                              int64_t out_stride, void* out_bias) {
  const ByToken& by_token = *arguments;
  const Factors& f = *factors;
  const int32_t* ids = by_token.ids;
  constexpr int64_t BLOCK = 256;
  return with_element(f.element, [&](auto element) {
    using T = decltype(element);
    // The thread that gets a token's first entry sums all its entries.
    const auto sum_token = [&](int64_t first) {
      thread_local std::vector<float> total;
      total.assign(f.width, 0.0f);
      T* row = out == nullptr ? nullptr : (T*)out + ids[first] * out_stride;
      T* bias = out_bias == nullptr ? nullptr : (T*)out_bias + ids[first];
      float bias_total = 0;
      for (int64_t k = first; k < by_token.count && ids[k] == ids[first]; ++k) {
        const float g = gradient[by_token.entries[k]];
        bias_total += g;
        if (row == nullptr) continue;
        if (k + 1 < by_token.count) {
          prefetch_row((const T*)f.hidden + by_token.rows[k + 1] * f.hidden_stride, f.width);
        }
        add_multiple(total.data(), g, (const T*)f.hidden + by_token.rows[k] * f.hidden_stride, f.width);
      }
      if (row != nullptr && by_token.add) add_multiple(total.data(), 1.0f, row, f.width);
      if (row != nullptr) write_row(total.data(), f.width, row);
      if (bias != nullptr) narrow(by_token.add ? widen(*bias) + bias_total : bias_total, bias);
    };
    return for_each(by_token.count, BLOCK, by_token.threads, [&](int64_t k) {
      if (ids[k] < by_token.vocab && (k == 0 || ids[k - 1] != ids[k])) sum_token(k);
    });
  });
}
}
