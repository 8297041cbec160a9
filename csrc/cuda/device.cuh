// What row_forward_gradient.cuh asks of the machine, on a GPU from sm_90 on. NVRTC compiles it without any header of
// CUDA's. tests/support/cluster/device.cuh is the same for a CPU.
#pragma once

namespace fastrl {

// --- where a thread is -----------------------------------------------------------------------------------------------

inline int thread_index() { return threadIdx.x; }

inline int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));  // read anew each time
  return index;
}

inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
inline unsigned char* shared_memory() { return dynamic_shared_memory; }

// --- barriers, and what crosses threads ------------------------------------------------------------------------------

inline void block_barrier() { __syncthreads(); }

// A barrier of the cluster in two halves, which orders no memory but the initialisations of arrivals before it.
inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Over the 32 threads of a warp, the result in each.
inline float warp_max(float x) {
  for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}
inline long long warp_sum(long long x) {
  for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

// --- what arrives by itself ------------------------------------------------------------------------------------------

typedef unsigned long long Arrival;  // tells when all bytes that are expected have arrived; used once

inline void arrival_init(Arrival* arrival) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
}

// After the initialisations: the unit that copies must see them, and after cluster_wait() the cluster's other blocks.
inline void arrivals_are_initialised() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

inline void arrival_expect(Arrival* arrival, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
               : "memory");
}

// Store to the same place in the shared memory of a block of the cluster; its 4 bytes count there for the same arrival.
inline void store_remote(float* place, int rank, float value, Arrival* arrival) {
  unsigned to, tells;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(place)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(tells) : "r"(shared_address(arrival)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(tells)
               : "memory");
}

// Both addresses and `bytes` are multiples of 16. L2 keeps what is read: in place, its lines are soon written.
inline void bulk_load(void* to, const void* from, unsigned bytes, Arrival* arrival) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  arrival_expect(arrival, bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(arrival)), "l"(policy)
      : "memory");
}

inline void arrival_wait(Arrival* arrival) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(arrival))
        : "memory");
  } while (!done);
}

// --- 16 bytes of global memory ---------------------------------------------------------------------------------------

inline uint4 load_words(const void* from) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

inline void store_words(void* to, uint4 words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// --- arithmetic: the instructions that Triton's operations become ----------------------------------------------------

inline float bits_to_float(unsigned bits) { return __uint_as_float(bits); }
inline unsigned float_to_bits(float x) { return __float_as_uint(x); }

inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline float quotient(float a, float b) {  // within 2 units in the last place
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
  return q;
}

inline float reciprocal(float x) {  // quotient(1, x) for x in [1, 2^126], where that needs no scaling
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// NaN if either is; fmaxf and fminf drop it.
inline float maximum(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
inline float minimum(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// --- elements, two in a word, the first in its lower half -------------------------------------------------------------

struct BFloat16 {
  unsigned short bits;
  static constexpr unsigned MINUS_INFINITY = 0xff80;

  static float first(unsigned word) { return bits_to_float(word << 16); }
  static float second(unsigned word) { return bits_to_float(word & 0xffff0000); }
  static unsigned pair(float first, float second) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
};

struct Float16 {
  unsigned short bits;
  static constexpr unsigned MINUS_INFINITY = 0xfc00;

  static float first(unsigned word) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)word));
    return x;
  }
  static float second(unsigned word) { return first(word >> 16); }
  static unsigned pair(float first, float second) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
};

}  // namespace fastrl
