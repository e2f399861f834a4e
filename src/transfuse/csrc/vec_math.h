// Functions of sixteen float32 numbers. Relative errors are below 5e-7 unless said; NaN stays NaN.
#pragma once

#include "vec.h"

namespace transfuse {

TF_INLINE f32x16 abs(f32x16 x) { return (f32x16)((i32x16)x & 0x7fffffff); }
TF_INLINE f32x16 copysign(f32x16 magnitude, f32x16 sign) {
  return (f32x16)(((i32x16)magnitude & 0x7fffffff) | ((i32x16)sign & static_cast<int32_t>(0x80000000)));
}

// coefficient[0] + coefficient[1] x + ...
template <int kCount>
TF_INLINE f32x16 polynomial(f32x16 x, const float (&coefficient)[kCount]) {
  f32x16 p = broadcast(coefficient[kCount - 1]);
  for (int i = kCount - 2; i >= 0; i--) p = fma(p, x, broadcast(coefficient[i]));
  return p;
}

TF_INLINE f32x16 sqrt(f32x16 x) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);  // unmasked, gcc 12 warns of its own header
#else
  float part[kLanes];
  store(part, x);
  for (int i = 0; i < kLanes; i++) part[i] = std::sqrt(part[i]);
  return load(part);
#endif
}

TF_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }

// Near zero a polynomial, since 1 - 2 / (e^2x + 1) would cancel.
TF_INLINE f32x16 tanh(f32x16 x) {
  constexpr float kSmall[] = {-0.333333343f, 0.133333027f, -0.0539592318f, 0.0217686817f, -0.00834316108f, 0.00229184818f};
  const f32x16 magnitude = abs(x), square = x * x;
  const f32x16 small = fma(x * square, polynomial(square, kSmall), x);
  const f32x16 large = copysign(1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f), x);
  return select(magnitude < 0.625f, small, large);
}

// The normal distribution up to x, without cancellation in its lower tail: e^(-x^2 / 2) times a polynomial in
// t = 1 / (1 + 0.4 |x| / sqrt 2), which runs from 1 to 0 as |x| grows. Relative error below 1e-6 down to -5, and 4e-6
// where the tail ends.
TF_INLINE f32x16 normal_cdf(f32x16 x) {
  constexpr float kTail[] = {0.225626305f,  0.226575688f,  0.200958803f,  0.196962178f, 0.0715103447f,
                             0.0997265875f, 0.0738447979f, -0.135472387f, 0.0402677655f};
  const f32x16 t = 1.0f / fma(abs(x), broadcast(0.282842712f), broadcast(1.0f));
  const f32x16 tail = 0.5f * t * polynomial(t, kTail) * exp(-0.5f * x * x);
  return select(x > f32x16{}, 1.0f - tail, tail);
}

// log((1 + s) / (1 - s)) for |s| <= 1/3.
TF_INLINE f32x16 log_of_ratio(f32x16 s) {
  constexpr float kSeries[] = {0.333333343f, 0.200000048f, 0.142851725f, 0.111320011f, 0.0873521045f, 0.103854381f};
  const f32x16 square = s * s;
  const f32x16 half = fma(s * square, polynomial(square, kSeries), s);
  return half + half;
}

// x = 2^n m with m between the roots of 1/2 and 2, so that numbers near 1 lose nothing.
TF_INLINE f32x16 log(f32x16 x) {
  constexpr int32_t kRootHalf = 0x3f3504f3;
  const i32x16 subnormal = x < 1.17549435e-38f;
  const i32x16 bits = (i32x16)select(subnormal, x * 8388608.0f, x) - kRootHalf;
  const f32x16 n = __builtin_convertvector((bits >> 23) - (subnormal & 23), f32x16);
  const f32x16 fraction = (f32x16)((bits & 0x7fffff) + kRootHalf) - 1.0f;
  f32x16 y = log_of_ratio(fraction / (2.0f + fraction));
  y = fma(n, broadcast(-2.12194440e-4f), y);
  y = fma(n, broadcast(0.693359375f), y);
  y = select(x == f32x16{}, broadcast(-INFINITY), y);
  y = select(x < f32x16{}, broadcast(NAN), y);
  return select(x < broadcast(INFINITY), y, x);
}

// log(1 + e^x).
TF_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 u = exp(-abs(x));
  return max(x, f32x16{}) + log_of_ratio(u / (2.0f + u));
}

struct SinCos {
  f32x16 sin;
  f32x16 cos;
};

// x minus a multiple of pi/2, taken in float64: errors below 1e-7 for |x| up to 1e8, and beyond one number at a time.
TF_INLINE SinCos sin_cos(f32x16 x) {
  constexpr float kSin[] = {-0.166666672f, 0.00833333191f, -0.000198400972f, 2.72506941e-06f};
  constexpr float kCos[] = {0.0416666642f, -0.00138882466f, 2.44971634e-05f, 6.69267237e-08f};
  float part[kLanes], rest[kLanes];
  int32_t turn[kLanes];
  store(part, x);
  for (int i = 0; i < kLanes; i++) {
    constexpr double kShifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    const double wide = part[i];
    const double n = (wide * 0.63661977236758134 + kShifter) - kShifter;
    rest[i] = static_cast<float>(wide - n * 1.5707963267948966);
    turn[i] = static_cast<int32_t>(n < 2e9 ? (n > -2e9 ? n : 0.0) : 0.0);
  }
  const f32x16 r = load(rest), square = r * r;
  i32x16 quarter;
  std::memcpy(&quarter, turn, sizeof quarter);
  const f32x16 sine = fma(r * square, polynomial(square, kSin), r);
  const f32x16 cosine = fma(square * square, polynomial(square, kCos), fma(square, broadcast(-0.5f), broadcast(1.0f)));
  const i32x16 is_odd = (quarter & 1) != 0;
  const i32x16 sign_sin = (quarter & 2) << 30, sign_cos = ((quarter + 1) & 2) << 30;
  SinCos result = {(f32x16)((i32x16)select(is_odd, cosine, sine) ^ sign_sin),
                   (f32x16)((i32x16)select(is_odd, sine, cosine) ^ sign_cos)};
  for (int i = 0; i < kLanes; i++) {
    if (!(std::fabs(part[i]) > 1e8f)) continue;
    result.sin[i] = std::sin(part[i]);
    result.cos[i] = std::cos(part[i]);
  }
  return result;
}

}  // namespace transfuse
