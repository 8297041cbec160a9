// Work distributed over torch's own threads, in blocks: a free thread takes the next block.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastrl {

// torch_parallel_for of libtorch_cpu (torch/csrc/stable/c/shim.h): the pool that torch.set_num_threads controls
using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
extern ParallelFor parallel_for;

// Entries that a row kernel gives to one thread together: 10 us of work, where a second thread takes 5 to 50 us to
// start, and milliseconds if it has no core.
constexpr int64_t GRAIN = 1 << 15;

// Of `count` items, how many a thread takes at a time: 8 blocks for each thread, within [least, most].
inline int64_t block_of(int64_t count, int threads, int64_t most, int64_t least = 1) {
  return std::max({int64_t(1), least, std::min(most, count / (8 * int64_t(threads)))});
}

struct Block {
  int64_t begin, end;  // begin >= count if no work is left
};

// Call worker(take) in up to `threads` threads, no more than there are blocks; take() returns the next block of
// [0, count). Returns torch's status.
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
  const int64_t workers = std::min<int64_t>(threads, (count + block - 1) / block);
  return parallel_for(0, workers, 1, [](int64_t, int64_t, void* w) { static_cast<Work*>(w)->run(); }, &work);
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
