// csrc/cuda/device.cuh for a CPU: a GPU's threads are contexts that run until they wait for others, so that barriers are
// real ones, and a missing one shows as a wrong result or as a deadlock.
#pragma once

#include <math.h>

#include <cstring>

// The CPU backend's elements, in a namespace of their own.
#define fastrl cpu
#include "vector.h"
#undef fastrl

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace fastrl {

typedef unsigned long long Arrival;

int thread_index();
int block_index();
int cluster_rank();
unsigned char* shared_memory();

void block_barrier();
void cluster_arrive();
void cluster_wait();
float warp_max(float x);
long long warp_sum(long long x);

void arrival_init(Arrival* arrival);
void arrivals_are_initialised();
void arrival_expect(Arrival* arrival, unsigned bytes);
void store_remote(float* place, int rank, float value, Arrival* arrival);
void bulk_load(void* to, const void* from, unsigned bytes, Arrival* arrival);
void arrival_wait(Arrival* arrival);
uint4 load_words(const void* from);
void store_words(void* to, uint4 words);

inline float bits_to_float(unsigned bits) { return cpu::as_float(bits); }
inline unsigned float_to_bits(float x) { return cpu::as_word(x); }
inline float exp2(float x) { return x < -126.0f ? 0.0f : ::exp2f(x); }  // subnormal results are flushed
inline float quotient(float a, float b) { return a / b; }
inline float reciprocal(float x) { return 1.0f / x; }
inline float maximum(float a, float b) { return a > b || a != a ? a : b; }
inline float minimum(float a, float b) { return a < b || a != a ? a : b; }

template <class T, unsigned INFINITE>
struct Element {
  unsigned short bits;
  static constexpr unsigned MINUS_INFINITY = INFINITE;

  static float first(unsigned word) { return cpu::widen(T{uint16_t(word)}); }
  static float second(unsigned word) { return first(word >> 16); }
  static unsigned pair(float first, float second) {
    T low, high;
    cpu::narrow(first, &low);
    cpu::narrow(second, &high);
    return low.bits | unsigned(high.bits) << 16;
  }
};
using BFloat16 = Element<cpu::BFloat16, 0xff80>;
using Float16 = Element<cpu::Float16, 0xfc00>;

}  // namespace fastrl
