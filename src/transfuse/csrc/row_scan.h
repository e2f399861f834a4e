// Passes over one row of logits: a pointer to them, or a `MaskedRow`.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace transfuse {

// A row of which some tokens may not be chosen: those without a bit count as -inf. The bits are those of whole sixteens.
template <class T>
struct MaskedRow {
  const T* logits;
  const uint16_t* bits;

  // By whole sixteens.
  MaskedRow operator+(int64_t i) const { return {logits + i, bits + i / kLanes}; }
};

template <class T>
MaskedRow<T> mask_row(const T* logits, const uint16_t* bits) {
  return {logits, bits};
}

// The logits of allowed tokens, and -inf for the others.
TF_INLINE f32x16 masked(f32x16 logits, uint16_t bits) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_mask_mov_ps((__m512)broadcast(-INFINITY), bits, (__m512)logits);
#else
  const i32x16 bit = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                      1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return select((bit & static_cast<int32_t>(bits)) != 0, logits, broadcast(-INFINITY));
#endif
}

template <class T>
TF_INLINE f32x16 load(MaskedRow<T> row) {
  return masked(load(row.logits), *row.bits);
}

template <class T>
TF_INLINE f32x16 load_part(MaskedRow<T> row, int64_t n) {
  return masked(load_part(row.logits, n), *row.bits);
}

// Calls f(sixteen logits, index of the first, part) along the row; where it ends, the lanes beyond are -inf. `part` is 0
// and 1 in turns, for sums of which one would wait for itself.
template <class Row, class F>
TF_INLINE void scan_row(Row row, int64_t n, F&& f) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    f(load(row + i), i, 0);
    f(load(row + i + kLanes), i + kLanes, 1);
  }
  if (i + kLanes <= n) {
    f(load(row + i), i, 0);
    i += kLanes;
  }
  if (i < n) f(select(lane < static_cast<int32_t>(n - i), load_part(row + i, n - i), broadcast(-INFINITY)), i, 1);
}

struct RowMax {
  float value;
  bool is_finite;  // false where the row holds NaN or +inf, or nothing but -inf
};

template <class Row>
RowMax row_max(Row row, int64_t n) {
  f32x16 best[2] = {broadcast(-INFINITY), broadcast(-INFINITY)};
  i32x16 is_less = ~i32x16{};
  scan_row(row, n, [&](f32x16 v, int64_t, int part) {
    best[part] = max(best[part], v);
    is_less &= v < broadcast(INFINITY);  // false of NaN too
  });
  const float value = max(max(best[0], best[1]));
  return {value, mask_bits(is_less) == 0xffff && value > -INFINITY};
}

// Turns logits into weights: e to the (x - max) / temperature, and 0 where that exponent is below the limit.
struct Weighing {
  float max;
  float inverse_temperature;
  float limit;

  TF_INLINE f32x16 operator()(f32x16 x) const {
    const f32x16 exponent = (x - max) * inverse_temperature;
    return select(exponent < broadcast(limit), f32x16{}, exp(exponent));
  }
};

// A sum in float64, in which a rare token keeps its share beside a common one.
class WideSum {
 public:
  TF_INLINE void add(f32x16 v) {
    f32x8 half[2];
    std::memcpy(half, &v, sizeof v);
    low_ += __builtin_convertvector(half[0], f64x8);
    high_ += __builtin_convertvector(half[1], f64x8);
  }

  double total() const {
    const f64x8 both = low_ + high_;
    return ((both[0] + both[1]) + (both[2] + both[3])) + ((both[4] + both[5]) + (both[6] + both[7]));
  }

 private:
  typedef float f32x8 __attribute__((vector_size(32)));
  typedef double f64x8 __attribute__((vector_size(64)));
  f64x8 low_ = {};
  f64x8 high_ = {};
};

constexpr int64_t kWeightBlock = 1024;

// Calls f(sum of weights, first, count) for each block of a row in turn.
template <class Row, class F>
TF_INLINE void sum_weights(Row row, int64_t n, const Weighing& weigh, F&& f) {
  for (int64_t first = 0; first < n; first += kWeightBlock) {
    const int64_t count = std::min(kWeightBlock, n - first);
    WideSum sum[2];
    scan_row(row + first, count, [&](f32x16 v, int64_t, int part) { sum[part].add(weigh(v)); });
    f(sum[0].total() + sum[1].total(), first, count);
  }
}

}  // namespace transfuse
