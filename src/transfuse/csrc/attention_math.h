// The arithmetic of attention on sixteen numbers: one multiply-accumulate, powers of two, and transposition.
#pragma once

#include "vec.h"

namespace transfuse::attention {

// Products are made of words. A word is one float32, or two neighbouring bfloat16 where the machine multiplies those.
#if defined(__AVX512BF16__)
struct Pair {
  uint32_t bits;
};

TF_INLINE f32x16 load_words(const Pair* p) { return (f32x16)_mm512_loadu_si512(p); }
TF_INLINE f32x16 broadcast_word(Pair x) { return (f32x16)_mm512_set1_epi32(static_cast<int>(x.bits)); }
TF_INLINE f32x16 multiply_add(Pair, f32x16 a, f32x16 b, f32x16 c) {
  return (f32x16)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#endif

TF_INLINE f32x16 load_words(const float* p) { return load(p); }
TF_INLINE f32x16 broadcast_word(float x) { return broadcast(x); }
TF_INLINE f32x16 multiply_add(float, f32x16 a, f32x16 b, f32x16 c) { return fma(a, b, c); }

// Numbers in a word.
template <class Word>
constexpr int kWidth = sizeof(Word) / 4;
template <>
inline constexpr int kWidth<float> = 1;
#if defined(__AVX512BF16__)
template <>
inline constexpr int kWidth<Pair> = 2;
#endif

// Rows and columns (of 16) of a product that fit in the machine's registers.
#if defined(__AVX512F__)
constexpr int kBlockRows = 6, kBlockColumns = 4;
#elif defined(__AVX2__)
constexpr int kBlockRows = 6, kBlockColumns = 1;
#else
constexpr int kBlockRows = 3, kBlockColumns = 1;
#endif

// 2 to the x for x <= 0, and 0 where that is hardly a normal float32: x = n + r with |r| <= 1/2, a polynomial in r,
// whose lowest coefficient is 1, and n put into the exponent. The result for 0 is exactly 1, for -inf exactly 0; NaN
// stays NaN.
template <int N>
TF_INLINE f32x16 exp2_by(const float (&polynomial)[N], f32x16 x) {
  constexpr float kLeast = -125.0f;
#if defined(__AVX512F__)
  // Denormal numbers, even on the way to 0, cost this hardware more than a hundred cycles each time.
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(kLeast), _CMP_NLT_UQ);
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const f32x16 r = x - n;
#else
  const f32x16 shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  // In this order, since `max` gives its second argument where one is NaN.
  const f32x16 bounded = max(broadcast(kLeast), x);
  const f32x16 n = (bounded + shifter) - shifter;
  const f32x16 r = bounded - n;
#endif
  f32x16 p = broadcast(polynomial[0]);
#pragma GCC unroll 8
  for (int i = 1; i < N; i++) p = fma(p, r, broadcast(polynomial[i]));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)n);
#else
  // NaN has no integer: p, which is NaN too, decides.
  const i32x16 whole = __builtin_convertvector(select(n == n, n, f32x16{}), i32x16);
  return select(x < broadcast(kLeast), f32x16{}, p * (f32x16)((whole + 127) << 23));
#endif
}

// Relative error below 1e-7; the polynomial is that of Cephes' exp2f.
TF_INLINE f32x16 exp2(f32x16 x) {
  constexpr float polynomial[] = {1.535336188e-4f, 1.339887440e-3f, 9.618437357e-3f,
                                  5.550332471e-2f, 2.402264791e-1f, 6.931472028e-1f};
  return exp2_by(polynomial, x);
}

// What a score, relative to the largest, weighs. Weights that will be rounded to bfloat16 need no more than 3e-6.
template <class Word>
TF_INLINE f32x16 weight_of(f32x16 x) {
  if constexpr (kWidth<Word> == 1) {
    return exp2(x);
  } else {
    constexpr float polynomial[] = {9.582853195e-3f, 5.590642524e-2f, 2.402409861e-1f, 6.931241933e-1f};
    return exp2_by(polynomial, x);
  }
}

// The largest lane; which of them where one is NaN is left open.
TF_INLINE float largest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return max(v);
#endif
}

// row[i][j] becomes row[j][i].
TF_INLINE void transpose(f32x16 (&row)[kLanes]) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps((__m512)row[i], (__m512)row[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)row[i], (__m512)row[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      const __m512d low = (__m512d)a[i + j], high = (__m512d)a[i + j + 2];
      b[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
      b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
    }
  }
  // Now quarter q of b[4 g + c] holds rows 4 g.. of column 4 q + c.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 even_low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    row[c] = (f32x16)_mm512_shuffle_f32x4(even_low, even_high, 0x88);
    row[4 + c] = (f32x16)_mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    row[8 + c] = (f32x16)_mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    row[12 + c] = (f32x16)_mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
#else
  float from[kLanes][kLanes], to[kLanes][kLanes];
  std::memcpy(from, row, sizeof from);
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < kLanes; j++) to[j][i] = from[i][j];
  std::memcpy(row, to, sizeof to);
#endif
}

}  // namespace transfuse::attention
