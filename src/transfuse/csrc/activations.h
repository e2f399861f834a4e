// Activation functions, sixteen numbers at a time.
#pragma once

#include <type_traits>

#include "vec_math.h"

namespace transfuse {

enum Activation : int32_t {
  kIdentity = 0,
  kSilu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kRelu = 4,
  kRelu2 = 5,
  kSigmoid = 6,
  kQuickGelu = 7,
  kTanh = 8,
};

template <int32_t kActivation>
TF_INLINE f32x16 activate(f32x16 x) {
  if constexpr (kActivation == kSilu) return x / (1.0f + exp(-x));
  if constexpr (kActivation == kGelu) return x * normal_cdf(x);
  if constexpr (kActivation == kGeluTanh) {
    // (1 + tanh(u)) / 2 is sigmoid(2u).
    const f32x16 u = x * fma(x * x, broadcast(0.044715f * 1.59576912f), broadcast(1.59576912f));
    return x / (1.0f + exp(-u));
  }
  if constexpr (kActivation == kRelu) return max(f32x16{}, x);  // in this order NaN stays NaN
  if constexpr (kActivation == kRelu2) {
    const f32x16 positive = max(f32x16{}, x);
    return positive * positive;
  }
  if constexpr (kActivation == kSigmoid) return sigmoid(x);
  if constexpr (kActivation == kQuickGelu) return x / (1.0f + exp(-1.702f * x));
  if constexpr (kActivation == kTanh) return tanh(x);
  return x;
}

// Calls f(std::integral_constant<int32_t, activation>()), so that loops are compiled for one activation.
template <class F>
void with_activation(int64_t activation, F&& f) {
  switch (activation) {
    case kSilu: return f(std::integral_constant<int32_t, kSilu>());
    case kGelu: return f(std::integral_constant<int32_t, kGelu>());
    case kGeluTanh: return f(std::integral_constant<int32_t, kGeluTanh>());
    case kRelu: return f(std::integral_constant<int32_t, kRelu>());
    case kRelu2: return f(std::integral_constant<int32_t, kRelu2>());
    case kSigmoid: return f(std::integral_constant<int32_t, kSigmoid>());
    case kQuickGelu: return f(std::integral_constant<int32_t, kQuickGelu>());
    case kTanh: return f(std::integral_constant<int32_t, kTanh>());
    default: return f(std::integral_constant<int32_t, kIdentity>());
  }
}

}  // namespace transfuse
