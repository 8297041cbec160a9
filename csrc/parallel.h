// Work distributed over torch's own threads, in blocks: a free thread takes the next block.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastrl {

// torch_parallel_for of libtorch_cpu (torch/csrc/stable/c/shim.h): the pool that torch.set_num_threads controls
using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
extern ParallelFor parallel_for;

struct Block {
  int64_t begin, end;  // begin >= count if no work is left
};

// Call worker(take) in each of `threads` threads; take() returns the next block of [0, count). Returns torch's status.
template <class F>
int32_t share_out(int64_t count, int64_t block, int threads, const F& worker) {
  struct Work {
    int64_t count, block;
    const F& worker;
    std::atomic<int64_t> next{0};

    void run() {
      const auto take = [this] {
        const int64_t begin = next.fetch_add(block, std::memory_order_relaxed);
        return Block{begin, std::min(begin + block, count)};
      };
      worker(take);
    }
  };
  Work work{count, block, worker};
  return parallel_for(0, threads, 1, [](int64_t, int64_t, void* w) { static_cast<Work*>(w)->run(); }, &work);
}

// Call each(i) for every i in [0, count).
template <class F>
int32_t for_each(int64_t count, int64_t block, int threads, const F& each) {
  return share_out(count, block, threads, [&](auto& take) {
    for (Block taken = take(); taken.begin < count; taken = take())
      for (int64_t i = taken.begin; i < taken.end; ++i) each(i);
  });
}

}  // namespace fastrl
