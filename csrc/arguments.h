// What the structs of arguments have in common. fastrl/backend/cpp/library.py packs these two, field by field.
#pragma once

#include <type_traits>

#include "vector.h"

namespace fastrl {

// Logits (a, b, vocab), or a gradient of them; strides in elements.
struct Tile {
  void* data;
  int64_t a, b, vocab, stride_a, stride_b;
  int32_t element;  // 0 float32, 1 bfloat16, 2 float16
  int32_t threads;  // torch's

  int64_t count() const { return a * b; }
  template <class T>
  T* at(int64_t row) const {
    return (T*)data + row / b * stride_a + row % b * stride_b;
  }
};

// The contract's Transform, from a logit to z, field by field.
struct TransformArguments {
  double temperature;
  const float* temperatures;  // or null: use `temperature`
  double logit_scale, softcap;

  double temperature_of(int64_t row) const { return temperatures == nullptr ? temperature : temperatures[row]; }
};

// Call f(T{}, softcap), both as types, for an element type and a softcap (0: none). Returns what f returns, or 1.
template <class F>
int32_t dispatch(int32_t element, double softcap, const F& f) {
  return with_element(element, [&](auto zero) {
    return softcap != 0 ? f(zero, std::true_type{}) : f(zero, std::false_type{});
  });
}

}  // namespace fastrl
