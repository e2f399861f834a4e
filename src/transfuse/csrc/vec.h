// Sixteen float32 numbers at a time, on whatever the compiler was told the machine has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "op.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TF_INLINE inline __attribute__((always_inline))

namespace transfuse {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

TF_INLINE void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

TF_INLINE f32x16 broadcast(float x) { return f32x16{} + x; }

// a * b + c, rounded once wherever the machine can. Never left to the compiler, which may fuse in one loop and not in
// another: a row's bits would then depend on which loop computed it.
TF_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union Halves {
    f32x16 all;
    __m256 half[2];
  } x{a}, y{b}, z{c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.all;
#else
  return a * b + c;
#endif
}

TF_INLINE float to_float(float x) { return x; }
TF_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// To the nearest, ties to even; NaN stays NaN.
TF_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
TF_INLINE T from_float(float x);
template <>
TF_INLINE float from_float<float>(float x) {
  return x;
}
template <>
TF_INLINE bf16 from_float<bf16>(float x) {
  return to_bf16(x);
}

TF_INLINE f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

TF_INLINE f32x16 load(const bf16* p) {
  u16x16 v;
  std::memcpy(&v, p, sizeof v);
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
}

TF_INLINE void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

TF_INLINE u16x16 rounded(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  const u32x16 bits = (u32x16)v;
  const u32x16 nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const u32x16 nan = (bits >> 16) | 0x40;
  const u32x16 is_nan = (u32x16)(v != v);
  return __builtin_convertvector((nan & is_nan) | (nearest & ~is_nan), u16x16);
#endif
}

TF_INLINE void store(bf16* p, f32x16 v) {
  const u16x16 r = rounded(v);
  std::memcpy(p, &r, sizeof r);
}

// The first n of sixteen; the others are 0, and memory beyond is not touched.
template <class T>
TF_INLINE f32x16 load_part(const T* p, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (sizeof(T) == 4) return (f32x16)_mm512_maskz_loadu_ps(mask, p);
  if constexpr (sizeof(T) == 2) {
    const u16x16 bits = (u16x16)_mm256_maskz_loadu_epi16(mask, p);
    return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
  }
#endif
  T part[kLanes] = {};
  for (int64_t i = 0; i < n; i++) part[i] = p[i];
  return load(part);
}

template <class T>
TF_INLINE void store_part(T* p, f32x16 v, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, mask, (__m512)v);
  if constexpr (sizeof(T) == 2) return _mm256_mask_storeu_epi16(p, mask, (__m256i)rounded(v));
#endif
  T part[kLanes];
  store(part, v);
  for (int64_t i = 0; i < n; i++) p[i] = part[i];
}

// Sum of the lanes, always in this order.
TF_INLINE float sum(f32x16 v) {
  float part[kLanes];
  store(part, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

// a where the mask, which a comparison made, is set, else b.
TF_INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return mask ? a : b; }

// b where either is NaN.
TF_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#else
  return select(a < b, a, b);
#endif
}
TF_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

// Bit i is set where lane i of the mask, which a comparison made, is.
TF_INLINE uint32_t mask_bits(i32x16 mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__)
  union Halves {
    i32x16 all;
    __m256 half[2];
  } x{mask};
  return static_cast<uint32_t>(_mm256_movemask_ps(x.half[0]) | (_mm256_movemask_ps(x.half[1]) << 8));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= (static_cast<uint32_t>(mask[i]) & 1) << i;
  return bits;
#endif
}

TF_INLINE float max(f32x16 v) {
  float part[kLanes];
  store(part, v);
  float result = part[0];
  for (int i = 1; i < kLanes; i++) result = part[i] > result ? part[i] : result;
  return result;
}

// p times 2 to the n, for whole n from -252 to 254.
TF_INLINE f32x16 scaled(f32x16 p, f32x16 n) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  // In two halves, since 2^128 has no float32.
  const i32x16 whole = __builtin_convertvector(n, i32x16);
  const i32x16 half = whole >> 1;
  return p * (f32x16)((half + 127) << 23) * (f32x16)((whole - half + 127) << 23);
#endif
}

// e to the x: x = n ln2 + r with |r| <= ln2 / 2, a polynomial of degree 6 in r, and n put into the exponent.
// Relative error below 2e-7; exactly 0 below -87.3, +inf above 88.7, NaN stays NaN.
TF_INLINE f32x16 exp(f32x16 x) {
  const f32x16 shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 bounded = min(broadcast(89.0f), max(broadcast(-88.0f), x));  // in this order NaN stays NaN
  const f32x16 n = fma(bounded, broadcast(1.44269504f), shifter) - shifter;
  f32x16 r = fma(n, broadcast(-0.693359375f), bounded);
  r = fma(n, broadcast(2.12194440e-4f), r);
  f32x16 p = broadcast(1.3888889e-3f);
  p = fma(p, r, broadcast(8.3333333e-3f));
  p = fma(p, r, broadcast(4.1666667e-2f));
  p = fma(p, r, broadcast(1.6666667e-1f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  f32x16 y = scaled(p, n);
  y = select(x < broadcast(-87.33f), f32x16{}, y);
  return select(x > broadcast(88.73f), broadcast(INFINITY), y);
}

}  // namespace transfuse
