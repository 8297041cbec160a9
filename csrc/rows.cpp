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

// The structs mirror those of fastrl/backend/cpp/backend.py, field by field.
struct Rows {
  void* logits;  // (a, b, vocab), strides in elements
  int64_t a, b, vocab, stride_a, stride_b;
  const int64_t* targets;
  const uint8_t* mask;        // or null
  const float* temperatures;  // or null: use `temperature`
  double temperature, logit_scale, softcap;
  int32_t element;  // 0 float32, 1 bfloat16, 2 float16
  int32_t threads;

  int64_t count() const { return a * b; }
  bool valid(int64_t row) const { return mask == nullptr || mask[row]; }
  double row_temperature(int64_t row) const { return temperatures == nullptr ? temperature : temperatures[row]; }
  template <class T>
  T* at(int64_t row) const {
    return (T*)logits + row / b * stride_a + row % b * stride_b;
  }
};

struct Gradient {
  const float *logprobs, *entropy, *maximum, *log_sum, *c;
  const float* h;  // or null
  void* out;       // (a, b, vocab); may be the logits, with the same strides
  int64_t stride_a, stride_b;
  int32_t element;  // of out: that of the logits, or any beside float32 logits
};

constexpr int64_t BLOCK_BYTES = 2 << 20;     // rows per block: a huge page, so that no two threads fault the same one
constexpr int64_t LARGE_BYTES = 8 << 20;     // no huge pages for smaller buffers
constexpr int64_t PREFETCH_BYTES = 1 << 20;  // longer rows leave no room in the second-level cache for the next row

// Call each_row(row, next) for every row; next is the row that this thread gets afterwards, or -1 if none is valid.
template <class F>
int32_t for_rows(const Rows& rows, int64_t row_bytes, const F& each_row) {
  const int64_t count = rows.count();
  const int64_t block = block_of(count, rows.threads, BLOCK_BYTES / row_bytes, GRAIN / rows.vocab);
  return share_out(count, block, rows.threads, [&](auto& take) {
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
  if (element == rows.element) return f(T{});
  if constexpr (std::is_same_v<T, float>) {
    if (element == 1) return f(BFloat16{});
    if (element == 2) return f(Float16{});
  }
  return 1;
}

template <bool softcap>
Transform<softcap> transform_of(const Rows& rows, int64_t row) {
  return {rows.row_temperature(row), rows.logit_scale, rows.softcap};
}

template <class T>
const T* to_prefetch(const Rows& rows, int64_t next) {
  return next < 0 || rows.vocab * int64_t(sizeof(T)) > PREFETCH_BYTES ? nullptr : rows.at<T>(next);
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
  return dispatch(rows, [&](auto element, auto softcap) {
    using T = decltype(element);
    return for_rows(rows, rows.vocab * sizeof(T), [&](int64_t row, int64_t next) {
      RowStatistics found{};
      if (rows.valid(row)) {
        const auto transform = transform_of<decltype(softcap)::value>(rows, row);
        found = row_statistics(rows.at<T>(row), rows.vocab, rows.targets[row], transform, to_prefetch<T>(rows, next));
      }
      float* out = statistics + row;
      const int64_t n = rows.count();
      out[0] = found.logprob, out[n] = found.entropy, out[2 * n] = found.maximum, out[3 * n] = found.log_sum;
    });
  });
}

int32_t fastrl_row_gradient(const Rows* arguments, const Gradient* gradient) {
  const Rows& rows = *arguments;
  const Gradient& g = *gradient;
  return dispatch(rows, [&](auto element, auto softcap) {
    using T = decltype(element);
    return dispatch_out<T>(rows, g.element, [&](auto out_element) {
      using Out = decltype(out_element);
      const int64_t dense = rows.count() * rows.vocab * int64_t(sizeof(Out));
      const int64_t span = ((rows.a - 1) * g.stride_a + (rows.b - 1) * g.stride_b + rows.vocab) * int64_t(sizeof(Out));
      if (g.out != rows.logits && span == dense) ask_for_huge_pages(g.out, dense);
      return for_rows(rows, rows.vocab * sizeof(T), [&](int64_t row, int64_t) {
        Out* out = (Out*)g.out + row / rows.b * g.stride_a + row % rows.b * g.stride_b;
        if (!rows.valid(row)) {
          std::fill(out, out + rows.vocab, Out{});
          return;
        }
        const auto transform = transform_of<decltype(softcap)::value>(rows, row);
        const RowStatistics statistics{g.logprobs[row], g.entropy[row], g.maximum[row], g.log_sum[row]};
        row_gradient(rows.at<T>(row), rows.vocab, rows.targets[row], transform, statistics, g.c[row],
                     or_else(g.h, row, 0.0f), out);
      });
    });
  });
}

int32_t fastrl_row_forward_gradient(const Rows* arguments, const LossArguments* loss) {
  const Rows& rows = *arguments;
  return dispatch(rows, [&](auto element, auto softcap) {
    using T = decltype(element);
    return dispatch_out<T>(rows, loss->out == nullptr ? rows.element : loss->element, [&](auto out_element) {
      using Out = decltype(out_element);
      if (loss->out != nullptr) ask_for_huge_pages(loss->out, rows.count() * loss->out_stride * int64_t(sizeof(Out)));
      return for_rows(rows, rows.vocab * sizeof(T), [&](int64_t row, int64_t next) {
        thread_local std::vector<float> kept;
        kept.resize(kept_size(rows.vocab));
        T* x = rows.at<T>(row);
        Out* out = loss->out == nullptr ? (Out*)x : (Out*)loss->out + row * loss->out_stride;
        RowStatistics found{};
        LossArguments::Terms terms{};
        if (rows.valid(row)) {
          const auto transform = transform_of<decltype(softcap)::value>(rows, row);
          found = row_statistics(x, rows.vocab, rows.targets[row], transform, to_prefetch<T>(rows, next), kept.data());
          terms = loss->run(row, found);
          row_gradient(x, rows.vocab, rows.targets[row], transform, found, float(terms[LossArguments::TERMS]),
                       float(terms[LossArguments::TERMS + 1]), out, kept.data());
        } else {
          std::fill(out, out + rows.vocab, Out{});
        }
        loss->write(row, rows.count(), found, terms);
      });
    });
  });
}
}
