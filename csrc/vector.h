// Vectors of W float32 lanes in the compilers' own vector types (GCC, Clang): loads and stores of the three element
// types, exp, log, tanh. Intrinsics are used only for single instructions that the vector types cannot express.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace fastrl {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Shorts __attribute__((vector_size(2 * W)));

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float QUIET_NAN = std::numeric_limits<float>::quiet_NaN();

inline Floats splat(float x) { return Floats{} + x; }

// The larger; b if either is NaN. So larger(x, running) drops a NaN x and larger(FLOOR, x) keeps it.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// The smaller; b if either is NaN.
inline Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// --- elements
// ---------------------------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t as_word(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // As float32 bits the exponent is 112 too small; the product is exact, for subnormal numbers too.
  return as_float(sign | as_word(as_float(magnitude << 13) * 0x1p112f));
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, BFloat16* out) {
  const uint32_t bits = as_word(x);
  out->bits = uint16_t(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float x, Float16* out) {
  const uint32_t bits = as_word(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 and above round to infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: the addition rounds to the last digit of float16
    half = as_word(as_float(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  out->bits = uint16_t(sign | half);
}

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Floats load(const BFloat16* p) {
  Shorts x;
  std::memcpy(&x, p, sizeof x);
  return (Floats)(__builtin_convertvector(x, Words) << 16);
}
inline Floats load(const Float16* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Floats x;
  for (int i = 0; i < W; ++i) x[i] = widen(p[i]);
  return x;
#endif
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline void store(BFloat16* p, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &rounded, sizeof rounded);
#else
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Shorts shorts = __builtin_convertvector((Words)(x == x) ? rounded : Words{} + 0x7fc0, Shorts);
  std::memcpy(p, &shorts, sizeof shorts);
#endif
}
inline void store(Float16* p, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < W; ++i) narrow(x[i], p + i);
#endif
}

// --- functions
// ----------------------------------------------------------------------------------------------------------

// The lower bound of exp_floored's arguments. There the result is exactly 0, and 0 * EXP_FLOOR is not NaN.
constexpr float EXP_FLOOR = -88.25f;

// e^x, within 1 ulp, for EXP_FLOOR <= x < 88, below e^-87.7 exactly 0; NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a minimax polynomial (relative error 2e-9 before rounding).
inline Floats exp_floored(Floats x) {
  // Adding 1.5 * 2^23 rounds to an integer in the low mantissa bits; the additional 127 is float32's exponent bias.
  const float round = 0x1.8p23f + 127;
  const Floats shifted = x * 1.44269504f + round;
  const Floats n = shifted - round;
  const Floats r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  Floats p = r * 0x1.6ae70ep-10f + 0x1.1267a4p-7f;
  p = p * r + 0x1.555822p-5f;
  p = p * r + 0x1.55541ap-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * (Floats)((Words)shifted << 23);  // at n = -127 the bits are those of 0
}

// log x, within 2 ulp, for normal finite x > 0; exactly 0 at 1.
// x = 2^n (1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1); log(1 + f) by a minimax polynomial (relative error 6e-9 before
// rounding).
inline Floats log_positive(Floats x) {
  const Ints n = ((Ints)x - 0x3f3504f3) >> 23;
  const Floats exponent = __builtin_convertvector(n, Floats);
  const Floats f = (Floats)((Ints)x - (Ints)((Words)n << 23)) - 1.0f;
  const Floats square = f * f;
  // By pairs: the chain of dependent operations is half as long as Horner's.
  const Floats low = (f * -0x1.000226p-2f + 0x1.555554p-2f) + square * (f * -0x1.547244p-3f + 0x1.99a008p-3f);
  const Floats high = (f * -0x1.0d8548p-3f + 0x1.22da2p-3f) + square * (f * -0x1.38b534p-4f + 0x1.055b5cp-3f);
  const Floats p = low + square * square * high;
  const Floats rest = square * (p * f - 0.5f) + exponent * 0x1.7f7d1cp-20f;
  return exponent * 0x1.62e4p-1f + (f + rest);
}

// log((1 + x) / (1 - x)), within 2 ulp, for |x| <= 1/3: x (2 + x^2 p(x^2)), p a minimax polynomial (relative error 5e-9
// before rounding).
inline Floats twice_atanh(Floats x) {
  const Floats q = x * x;
  Floats p = q * 0x1.1ed986p-2f + 0x1.1ebcb8p-2f;
  p = p * q + 0x1.99d20cp-2f;
  p = p * q + 0x1.555502p-1f;
  return x * (p * q + 2.0f);
}

struct Tanh {
  Floats value, slope;  // tanh x and 1 - tanh^2 x, both with a small relative error
};

inline Tanh tanh_with_slope(Floats x) {
  const Words sign = (Words)x & 0x80000000;
  const Floats size = (Floats)((Words)x & 0x7fffffff);
  const Floats e = exp_floored(larger(splat(EXP_FLOOR), size * -2.0f));
  const Floats inverse = 1.0f / (1.0f + e);
  const Floats far = (Floats)((Words)(1.0f - 2.0f * e * inverse) | sign);
  // Below 0.625 that would cancel; use Cephes' odd polynomial.
  const Floats q = x * x;
  Floats near = q * -5.70498872745e-3f + 2.06390887954e-2f;
  near = near * q - 5.37397155531e-2f;
  near = near * q + 1.33314422036e-1f;
  near = near * q - 3.33332819422e-1f;
  near = near * q * x + x;
  return {size < 0.625f ? near : far, 4.0f * e * inverse * inverse};
}

// Call f with a number of the type that `element` names; 1 for a name that there is not.
template <class F>
int32_t with_element(int32_t element, const F& f) {
  switch (element) {
    case 0: return f(float{});
    case 1: return f(BFloat16{});
    case 2: return f(Float16{});
    default: return 1;
  }
}

}  // namespace fastrl
