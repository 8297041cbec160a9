// Runs clusters of csrc/cuda/row_forward_gradient.cuh one after another, each thread of theirs as a context.
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "row_forward_gradient.cuh"

namespace {

constexpr int STACK = 64 << 10;

struct Meeting {  // a barrier that can be used again
  int arrived = 0;
  unsigned generation = 0;
};

struct Copy {  // on its way
  void* to;
  const void* from;  // null: `value` is stored
  unsigned bytes;
  float value;
};

struct Expected {  // by an arrival
  bool initialised = false, visible = false, done = false;
  long long left = -1;  // bytes, less those on their way
  std::vector<Copy> copies;
};

struct Warp {
  Meeting meeting;
  float numbers[32];
  long long integers[32];
};

struct Block {
  unsigned char* memory;
  Meeting meeting;
  std::vector<Warp> warps;
  std::map<fastrl::Arrival*, Expected> arrivals;
};

struct Thread {
  ucontext_t context;
  int index, rank;
  unsigned cluster_generation;
  bool done;
};

struct Cluster {
  int first_block, threads, shared;
  Meeting meeting;
  std::vector<Block> blocks;
};

Cluster cluster;
Thread* current;
ucontext_t scheduler;
const char* failure;
unsigned events;  // what a waiting thread may have waited for
void (*run)(const void*);
const void* arguments;

void yield() { swapcontext(&current->context, &scheduler); }

void fail(const char* message) {
  failure = message;
  yield();  // for ever
}

void arrive(Meeting& meeting, int count) {
  if (++meeting.arrived == count) meeting.arrived = 0, ++meeting.generation, ++events;
}

void meet(Meeting& meeting, int count) {
  const unsigned generation = meeting.generation;
  arrive(meeting, count);
  while (meeting.generation == generation) yield();
}

Block& block() { return cluster.blocks[current->rank]; }
Warp& warp() { return block().warps[current->index / 32]; }

void entry() {
  run(arguments);
  current->done = true;
  ++events;
  yield();
}

// Runs a cluster's threads in turns, in an order that depends on `order`: forwards, backwards, or drawn from it.
void run_cluster(int order) {
  const int count = cluster.threads * int(cluster.blocks.size());
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (int(stacks.size()) < count) stacks.emplace_back(new char[STACK]);
  std::vector<Thread> threads(count);
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    thread.index = i % cluster.threads, thread.rank = i / cluster.threads, thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[i].get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
  }
  std::vector<int> turns(count);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  if (order > 1) std::shuffle(turns.begin(), turns.end(), std::mt19937(order));
  for (int left = count; left > 0 && failure == nullptr;) {
    const unsigned before = events;
    for (const int i : turns) {
      if (threads[i].done || failure != nullptr) continue;
      current = &threads[i];
      swapcontext(&scheduler, &current->context);
      left -= threads[i].done;
    }
    if (events == before && failure == nullptr) failure = "the threads wait for each other";
  }
}

}  // namespace

namespace fastrl {

int thread_index() { return current->index; }
int block_index() { return cluster.first_block + current->rank; }
int cluster_rank() { return current->rank; }
unsigned char* shared_memory() { return block().memory; }

void block_barrier() { meet(block().meeting, cluster.threads); }

void cluster_arrive() {
  current->cluster_generation = cluster.meeting.generation;
  arrive(cluster.meeting, cluster.threads * int(cluster.blocks.size()));
}
void cluster_wait() {
  while (cluster.meeting.generation == current->cluster_generation) yield();
}

float warp_max(float x) {
  Warp& w = warp();
  w.numbers[current->index % 32] = x;
  meet(w.meeting, 32);
  x = *std::max_element(w.numbers, w.numbers + 32);
  meet(w.meeting, 32);
  return x;
}
long long warp_sum(long long x) {
  Warp& w = warp();
  w.integers[current->index % 32] = x;
  meet(w.meeting, 32);
  x = std::accumulate(w.integers, w.integers + 32, 0ll);
  meet(w.meeting, 32);
  return x;
}

void arrival_init(Arrival* arrival) { block().arrivals[arrival].initialised = true; }
void arrivals_are_initialised() {
  for (auto& [_, expected] : block().arrivals) expected.visible = true;
}
void arrival_expect(Arrival* arrival, unsigned bytes) {
  Expected& expected = block().arrivals[arrival];
  if (!expected.initialised || !expected.visible || expected.left != -1) fail("an arrival that cannot expect anything");
  expected.left = bytes, ++events;
}

// Copies are made as late as possible: where the first thread waits for them.
void bulk_load(void* to, const void* from, unsigned bytes, Arrival* arrival) {
  const long long end = (unsigned char*)to + bytes - block().memory;
  if ((size_t(to) | size_t(from) | bytes) % 16 != 0) fail("a bulk load that is not aligned");
  if (end > cluster.shared) fail("a bulk load beyond the shared memory");
  arrival_expect(arrival, bytes);
  Expected& expected = block().arrivals[arrival];
  expected.copies.push_back({to, from, bytes, 0.0f}), expected.left -= bytes;
}
void store_remote(float* place, int rank, float value, Arrival* arrival) {
  Block& other = cluster.blocks[rank];
  const auto there = [&](void* p) { return other.memory + ((unsigned char*)p - block().memory); };
  const auto found = other.arrivals.find((Arrival*)there(arrival));
  if (found == other.arrivals.end() || found->second.left < int(sizeof value)) fail("a store that nothing expects");
  found->second.copies.push_back({there(place), nullptr, sizeof value, value});
  found->second.left -= sizeof value, ++events;
}
void arrival_wait(Arrival* arrival) {
  const auto found = block().arrivals.find(arrival);
  if (found == block().arrivals.end()) fail("a wait for an arrival that is not initialised");
  Expected& expected = found->second;
  while (expected.left != 0) yield();
  if (!expected.done)
    for (const Copy& x : expected.copies) std::memcpy(x.to, x.from != nullptr ? x.from : &x.value, x.bytes);
  expected.done = true;
}

uint4 load_words(const void* from) {
  if (size_t(from) % 16 != 0) fail("a load that is not aligned");
  uint4 words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
void store_words(void* to, uint4 words) {
  if (size_t(to) % 16 != 0) fail("a store that is not aligned");
  std::memcpy(to, &words, sizeof words);
}

}  // namespace fastrl

namespace {

using namespace fastrl;

struct Objective {
  static inline int gate, kl;

  auto operator()(double logp, double entropy, const auto& inputs, const auto& numbers) const {
    return formulas::token_terms(formulas::GATE_VALUE[gate], formulas::GATE_WEIGHT[gate], formulas::GATE_SIDE[gate],
                                 formulas::GATE_BASELINE[gate], formulas::KL_VALUE[kl], formulas::KL_GRADIENT[kl],
                                 logp, entropy, inputs, numbers);
  }
};

template <class T, int SEGMENTS, int THREADS, bool SOFTCAP, bool ENTROPY>
void kernel(const void* arguments) {
  row_forward_gradient<T, SEGMENTS, THREADS, SOFTCAP, ENTROPY>(*(const Arguments*)arguments, Objective{});
}

template <class T, int SEGMENTS, int THREADS>
void choose(bool softcap, bool entropy) {
  run = softcap ? entropy ? kernel<T, SEGMENTS, THREADS, true, true> : kernel<T, SEGMENTS, THREADS, true, false>
        : entropy ? kernel<T, SEGMENTS, THREADS, false, true>
                  : kernel<T, SEGMENTS, THREADS, false, false>;
}

template <class T>
void choose(int segments, int threads, bool softcap, bool entropy) {
  if (segments == 1 && threads == 256) choose<T, 1, 256>(softcap, entropy);
  if (segments == 2 && threads == 256) choose<T, 2, 256>(softcap, entropy);
  if (segments == 4 && threads == 256) choose<T, 4, 256>(softcap, entropy);
  if (segments == 4 && threads == 512) choose<T, 4, 512>(softcap, entropy);
}

}  // namespace

// Null, or what went wrong.
extern "C" const char* emulate(const Arguments* given, int float16, int segments, int threads, int softcap, int entropy,
                               int gate, int kl, int shared, int order) {
  run = nullptr, failure = nullptr;
  if (float16) {
    choose<Float16>(segments, threads, softcap, entropy);
  } else {
    choose<BFloat16>(segments, threads, softcap, entropy);
  }
  if (run == nullptr) return "no such variant";
  arguments = given;
  Objective::gate = gate, Objective::kl = kl;
  const size_t bytes = size_t(shared) + 128;
  std::unique_ptr<unsigned char[]> memory(new unsigned char[bytes * segments]);
  for (int row = 0; row < given->rows && failure == nullptr; ++row) {
    std::memset(memory.get(), 0xff, bytes * segments);  // NaN
    cluster = {row * segments, threads, shared, {}, std::vector<Block>(segments)};
    for (int i = 0; i < segments; ++i) {
      const size_t begin = size_t(memory.get() + i * bytes);
      cluster.blocks[i].memory = (unsigned char*)((begin + 127) / 128 * 128);
      cluster.blocks[i].warps.resize(threads / 32);
    }
    run_cluster(order);
  }
  return failure;
}
