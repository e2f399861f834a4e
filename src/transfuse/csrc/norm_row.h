// The norm of one row. Every kernel that norms rows does it through this file, so that all of them give the same bits.
#pragma once

#include <cmath>

#include "op.h"
#include "vec.h"

namespace transfuse {

enum NormKind : int32_t { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };

struct NormSettings {
  int32_t kind;
  float eps;     // added to the mean square or the variance
  float offset;  // added to the weight, where there is one
  const void* weight;  // [n], or null
  const void* bias;    // [n], or null
  int32_t weight_dtype;
  int32_t bias_dtype;
};

inline NormSettings norm_settings(int64_t kind, double eps, double offset, const Tensor& weight, const Tensor& bias) {
  return {static_cast<int32_t>(kind), static_cast<float>(eps), static_cast<float>(offset), weight.data, bias.data,
          weight.dtype, bias.dtype};
}

// Calls step(accumulator, sixteen numbers, how many of them there are) along the row and adds up what the accumulators
// hold. Four of them, since one would wait for itself; which number goes to which depends on n alone.
template <class T, class Step>
TF_INLINE float reduce_row(const T* x, int64_t n, Step step) {
  f32x16 acc[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) step(acc[j], load(x + i + j * kLanes), kLanes);
  for (; i + kLanes <= n; i += kLanes) step(acc[0], load(x + i), kLanes);
  if (i < n) step(acc[1], load_part(x + i, n - i), static_cast<int>(n - i));
  return sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

TF_INLINE f32x16 zero_from(f32x16 v, int n) {
  if (n == kLanes) return v;
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select(lane < n, v, f32x16{});
}

// What a row is shifted and multiplied by.
struct RowScale {
  float mean;
  float scale;
};

template <class T>
TF_INLINE RowScale row_scale(const T* x, int64_t n, int32_t kind, float eps) {
  if (kind == kRmsNorm) {
    const float squares = reduce_row(x, n, [](f32x16& acc, f32x16 v, int) { acc = fma(v, v, acc); });
    return {0.0f, 1.0f / std::sqrt(squares / static_cast<float>(n) + eps)};
  }
  const float mean = reduce_row(x, n, [](f32x16& acc, f32x16 v, int) { acc += v; }) / static_cast<float>(n);
  const float squares = reduce_row(x, n, [mean](f32x16& acc, f32x16 v, int count) {
    const f32x16 centred = zero_from(v - mean, count);
    acc = fma(centred, centred, acc);
  });
  return {mean, 1.0f / std::sqrt(squares / static_cast<float>(n) + eps)};
}

// out = (x - mean) * scale * (weight + offset) + bias, rounded once; `out` may be `x`.
template <class T, class Out>
void norm_row(const T* x, Out* out, int64_t n, const NormSettings& s) {
  const RowScale row = row_scale(x, n, s.kind, s.eps);
  const auto number = [](const void* p, int32_t dtype, int64_t i, int64_t count) {
    if (dtype == kBFloat16) {
      const bf16* q = static_cast<const bf16*>(p) + i;
      return count == kLanes ? load(q) : load_part(q, count);
    }
    const float* q = static_cast<const float*>(p) + i;
    return count == kLanes ? load(q) : load_part(q, count);
  };
  const auto normed = [&](f32x16 v, int64_t i, int64_t count) {
    v = (v - row.mean) * row.scale;
    const f32x16 bias = s.bias != nullptr ? number(s.bias, s.bias_dtype, i, count) : f32x16{};
    if (s.weight == nullptr) return v + bias;
    return fma(v, number(s.weight, s.weight_dtype, i, count) + s.offset, bias);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, normed(load(x + i), i, kLanes));
  if (i < n) store_part(out + i, normed(load_part(x + i, n - i), i, n - i), n - i);
}

// sum = x + addend, rounded to the dtype of `sum`, which may be either of them.
template <class T, class Addend, class Sum>
TF_INLINE void add_row(const T* x, const Addend* addend, Sum* sum, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(sum + i, load(x + i) + load(addend + i));
  if (i < n) store_part(sum + i, load_part(x + i, n - i) + load_part(addend + i, n - i), n - i);
}

}  // namespace transfuse
