// The CPU backend's C interface: rows of logits, distributed over torch's threads. See fastrl/backend/contract.py.
#include "rows.h"

#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "objective.h"
#include "parallel.h"

namespace fastrl {

ParallelFor parallel_for = nullptr;
}

namespace {

using namespace fastrl;

// fastrl/backend/cpp/backend.py packs the structs, field by field.
struct Rows {
  Tile logits;
  const int64_t* targets;
  const uint8_t* mask;  // or null
  TransformArguments transform;

  bool valid(int64_t row) const { return mask == nullptr || mask[row]; }
};

struct Gradient {
  const float *logprobs, *entropy, *maximum, *log_sum, *c;
  const float* h;  // or null
  Tile out;        // of the logits' shape; may be the logits, with the same strides. Any element beside float32 logits
};

constexpr int64_t BLOCK_BYTES = 2 << 20;     // rows per block: a huge page, so that no two threads fault the same one
constexpr int64_t LARGE_BYTES = 8 << 20;     // no huge pages for smaller buffers
constexpr int64_t PREFETCH_BYTES = 1 << 20;  // longer rows leave no room in the second-level cache for the next row

// Call each_row(row, next) for every row; next is the row that this thread gets afterwards, or -1 if none is valid.
template <class F>
int32_t for_rows(const Rows& rows, int64_t row_bytes, const F& each_row) {
  const int64_t count = rows.logits.count();
  const int64_t block = block_of(count, rows.logits.threads, BLOCK_BYTES / row_bytes, GRAIN / rows.logits.vocab);
  return share_out(count, block, rows.logits.threads, [&](auto& take) {
    int64_t end = 0;
    const auto after = [&](int64_t row) {
      if (row + 1 < end) return row + 1;
      const Block taken = take();
      end = taken.end;
      return taken.begin;
    };
    for (int64_t row = after(-1); row < count;) {
      const int64_t following = after(row);
      each_row(row, following < count && rows.valid(following) ? following : -1);
      row = following;
    }
  });
}

// Call f(Out{}) with the element type of the gradient of logits of type T.
template <class T, class F>
int32_t dispatch_out(const Rows& rows, int32_t element, const F& f) {
  if (element == rows.logits.element) return f(T{});
  if constexpr (std::is_same_v<T, float>) {
    if (element == 1) return f(BFloat16{});
    if (element == 2) return f(Float16{});
  }
  return 1;
}

template <class T>
const T* to_prefetch(const Rows& rows, int64_t next) {
  return next < 0 || rows.logits.vocab * int64_t(sizeof(T)) > PREFETCH_BYTES ? nullptr : rows.logits.at<T>(next);
}

// A new buffer of hundreds of megabytes costs more in page faults than in work: ask for huge pages.
void ask_for_huge_pages(void* begin, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = ((uintptr_t)begin + page - 1) / page * page, last = ((uintptr_t)begin + bytes) / page * page;
  if (bytes >= LARGE_BYTES) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

extern "C" {

int32_t fastrl_advise(void* begin, int64_t bytes) {
  ask_for_huge_pages(begin, bytes);
  return 0;
}

void fastrl_set_parallel_for(void* function) { parallel_for = reinterpret_cast<ParallelFor>(function); }

// statistics: (4, rows), in the order of the contract's Statistics. All functions here return 0 or an error code.
int32_t fastrl_row_statistics(const Rows* arguments, float* statistics) {
  const Rows& rows = *arguments;
  const int64_t count = rows.logits.count(), vocab = rows.logits.vocab;
  return dispatch(rows.logits.element, rows.transform.softcap, [&](auto element, auto softcap) {
    using T = decltype(element);
    return for_rows(rows, vocab * sizeof(T), [&](int64_t row, int64_t next) {
      RowStatistics found{};
      if (rows.valid(row)) {
        const Transform<decltype(softcap)::value> transform(rows.transform, row);
        found = row_statistics(rows.logits.at<T>(row), vocab, rows.targets[row], transform, to_prefetch<T>(rows, next));
      }
      float* out = statistics + row;
      out[0] = found.logprob, out[count] = found.entropy;
      out[2 * count] = found.maximum, out[3 * count] = found.log_sum;
    });
  });
}

int32_t fastrl_row_gradient(const Rows* arguments, const Gradient* gradient) {
  const Rows& rows = *arguments;
  const int64_t count = rows.logits.count(), vocab = rows.logits.vocab;
  const Gradient& g = *gradient;
  return dispatch(rows.logits.element, rows.transform.softcap, [&](auto element, auto softcap) {
    using T = decltype(element);
    return dispatch_out<T>(rows, g.out.element, [&](auto out_element) {
      using Out = decltype(out_element);
      const int64_t dense = count * vocab * int64_t(sizeof(Out));
      const int64_t last = (g.out.a - 1) * g.out.stride_a + (g.out.b - 1) * g.out.stride_b;
      const bool gaps = (last + g.out.vocab) * int64_t(sizeof(Out)) != dense;
      if (g.out.data != rows.logits.data && !gaps) ask_for_huge_pages(g.out.data, dense);
      return for_rows(rows, vocab * sizeof(T), [&](int64_t row, int64_t) {
        Out* out = g.out.at<Out>(row);
        if (!rows.valid(row)) {
          std::fill(out, out + vocab, Out{});
          return;
        }
        const Transform<decltype(softcap)::value> transform(rows.transform, row);
        const RowStatistics statistics{g.logprobs[row], g.entropy[row], g.maximum[row], g.log_sum[row]};
        row_gradient(rows.logits.at<T>(row), vocab, rows.targets[row], transform, statistics, g.c[row],
                     or_else(g.h, row, 0.0f), out);
      });
    });
  });
}

int32_t fastrl_row_forward_gradient(const Rows* arguments, const LossArguments* loss) {
  const Rows& rows = *arguments;
  const int64_t count = rows.logits.count(), vocab = rows.logits.vocab;
  return dispatch(rows.logits.element, rows.transform.softcap, [&](auto element, auto softcap) {
    using T = decltype(element);
    return dispatch_out<T>(rows, loss->out == nullptr ? rows.logits.element : loss->element, [&](auto out_element) {
      using Out = decltype(out_element);
      if (loss->out != nullptr) ask_for_huge_pages(loss->out, count * loss->out_stride * int64_t(sizeof(Out)));
      return for_rows(rows, vocab * sizeof(T), [&](int64_t row, int64_t next) {
        thread_local std::vector<float> kept;
        kept.resize(kept_size(vocab));
        T* x = rows.logits.at<T>(row);
        Out* out = loss->out == nullptr ? (Out*)x : (Out*)loss->out + row * loss->out_stride;
        RowStatistics found{};
        LossArguments::Terms terms{};
        if (rows.valid(row)) {
          const Transform<decltype(softcap)::value> transform(rows.transform, row);
          found = row_statistics(x, vocab, rows.targets[row], transform, to_prefetch<T>(rows, next), kept.data());
          terms = loss->run(row, found);
          row_gradient(x, vocab, rows.targets[row], transform, found, float(terms[LossArguments::TERMS]),
                       float(terms[LossArguments::TERMS + 1]), out, kept.data());
        } else {
          std::fill(out, out + vocab, Out{});
        }
        loss->write(row, count, found, terms);
      });
    });
  });
}
}
