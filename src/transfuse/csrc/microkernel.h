// Products of a few rows of x with a few blocks of a packed weight, held in registers over the whole of K.
//
// Every output is one sum over K, in order, in one accumulator. All instances below compute it the same way, so a row's
// bits depend neither on how many rows come with it nor on which instance computes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "packed.h"
#include "vec.h"

#if defined(__clang__)
#define TF_UNROLL _Pragma("unroll")
#else
#define TF_UNROLL _Pragma("GCC unroll 16")
#endif

namespace transfuse {

// Rows of x as a product reads them: either as they lie in memory, or in a panel [units, rows rounded up to 4] of
// units.
struct Left {
  const char* data;
  int64_t row_bytes;  // between rows; not of panels
  int64_t units;      // that are complete
  bool half_unit;     // whether half a unit follows

  // At most `count` units from `first` on, `stride` bytes apart.
  Left part(int64_t first, int64_t count, int64_t stride) const {
    return {data + first * stride, row_bytes, std::min(units - first, count), half_unit && units - first < count};
  }
};

constexpr int64_t panel_width(int64_t rows) { return (rows + 3) / 4 * 4; }

TF_INLINE uint32_t load_unit(const char* p) {
  uint32_t unit;
  std::memcpy(&unit, p, 4);
  return unit;
}

// What differs between machines: for weights of type W, `Weights` is a unit of all rows of a block, `Value` a unit of a
// row of x, `Sum` sixteen accumulators. Registers limit the rows of a product, and the blocks that go with so many
// rows; up to kMaxDirectRows rows need no panel.
template <class W>
struct Arithmetic;

#if defined(__AVX512F__) && defined(__AVX512BF16__)

struct Arithmetic512 {
  // 32 registers.
  static constexpr int kMaxRows = 12, kMaxDirectRows = 6;
  static constexpr int max_blocks(int64_t rows) { return rows <= 4 ? 6 : rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }

  using Sum = __m512;
  using Weights = __m512i;
  using Value = __m512i;
  static TF_INLINE Sum zero() { return _mm512_setzero_ps(); }
  static TF_INLINE Sum load(const float* p) { return _mm512_loadu_ps(p); }
  static TF_INLINE Weights weights(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static TF_INLINE Value value(uint32_t unit) { return _mm512_set1_epi32(static_cast<int>(unit)); }
  static TF_INLINE void store(float* p, Sum sum) { _mm512_storeu_ps(p, sum); }
};

template <>
struct Arithmetic<bf16> : Arithmetic512 {
  static TF_INLINE void add_product(Sum& sum, Value x, Weights w) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
  }
};

template <>
struct Arithmetic<float> : Arithmetic512 {
  static TF_INLINE void add_product(Sum& sum, Value x, Weights w) {
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
  }
};

#elif defined(__AVX2__) && defined(__FMA__)

// 16 registers of half a block each.
struct Arithmetic256 {
  static constexpr int max_blocks(int64_t rows) { return rows == 1 ? 3 : 1; }

  struct Sum {
    __m256 half[2];
  };
  static TF_INLINE Sum zero() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
  static TF_INLINE Sum load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
  static TF_INLINE void store(float* p, const Sum& sum) {
    _mm256_storeu_ps(p, sum.half[0]);
    _mm256_storeu_ps(p + 8, sum.half[1]);
  }
};

// The two bfloat16 of a unit as float32: the upper half of a float32 is a bfloat16.
TF_INLINE __m256 lower(__m256i units) { return _mm256_castsi256_ps(_mm256_slli_epi32(units, 16)); }
TF_INLINE __m256 upper(__m256i units) {
  return _mm256_castsi256_ps(_mm256_and_si256(units, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

template <>
struct Arithmetic<bf16> : Arithmetic256 {
  static constexpr int kMaxRows = 4, kMaxDirectRows = 4;
  struct Weights {
    __m256 first[2], second[2];
  };
  struct Value {
    __m256 first, second;
  };
  static TF_INLINE Weights weights(const uint32_t* p) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8));
    return {{lower(a), lower(b)}, {upper(a), upper(b)}};
  }
  static TF_INLINE Value value(uint32_t unit) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(unit));
    return {lower(all), upper(all)};
  }
  static TF_INLINE void add_product(Sum& sum, const Value& x, const Weights& w) {
    sum.half[0] = _mm256_fmadd_ps(x.first, w.first[0], sum.half[0]);
    sum.half[1] = _mm256_fmadd_ps(x.first, w.first[1], sum.half[1]);
    sum.half[0] = _mm256_fmadd_ps(x.second, w.second[0], sum.half[0]);
    sum.half[1] = _mm256_fmadd_ps(x.second, w.second[1], sum.half[1]);
  }
};

template <>
struct Arithmetic<float> : Arithmetic256 {
  static constexpr int kMaxRows = 6, kMaxDirectRows = 6;
  struct Weights {
    __m256 half[2];
  };
  using Value = __m256;
  static TF_INLINE Weights weights(const uint32_t* p) {
    const float* q = reinterpret_cast<const float*>(p);
    return {{_mm256_loadu_ps(q), _mm256_loadu_ps(q + 8)}};
  }
  static TF_INLINE Value value(uint32_t unit) {
    return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(unit)));
  }
  static TF_INLINE void add_product(Sum& sum, Value x, const Weights& w) {
    sum.half[0] = _mm256_fmadd_ps(x, w.half[0], sum.half[0]);
    sum.half[1] = _mm256_fmadd_ps(x, w.half[1], sum.half[1]);
  }
};

#else

struct ArithmeticPlain {
  static constexpr int kMaxRows = 4, kMaxDirectRows = 4;
  static constexpr int max_blocks(int64_t) { return 1; }

  using Sum = f32x16;
  static TF_INLINE Sum zero() { return f32x16{}; }
  static TF_INLINE Sum load(const float* p) { return transfuse::load(p); }
  static TF_INLINE void store(float* p, const Sum& sum) { transfuse::store(p, sum); }
};

template <>
struct Arithmetic<bf16> : ArithmeticPlain {
  struct Weights {
    f32x16 first, second;
  };
  using Value = Weights;
  static TF_INLINE Weights split(u32x16 units) { return {(f32x16)(units << 16), (f32x16)(units & 0xffff0000u)}; }
  static TF_INLINE Weights weights(const uint32_t* p) {
    u32x16 units;
    std::memcpy(&units, p, sizeof units);
    return split(units);
  }
  static TF_INLINE Value value(uint32_t unit) { return split(u32x16{} + unit); }
  static TF_INLINE void add_product(Sum& sum, const Value& x, const Weights& w) {
    sum = fma(x.second, w.second, fma(x.first, w.first, sum));
  }
};

template <>
struct Arithmetic<float> : ArithmeticPlain {
  using Weights = f32x16;
  using Value = f32x16;
  static TF_INLINE Weights weights(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static TF_INLINE Value value(uint32_t unit) {
    float x;
    std::memcpy(&x, &unit, 4);
    return broadcast(x);
  }
  static TF_INLINE void add_product(Sum& sum, const Value& x, const Weights& w) { sum = fma(x, w, sum); }
};

#endif

// How many units ahead of the product its weights are fetched: about as much memory as is on its way at a time, and
// more where much arithmetic per unit leaves the processor few loads to see ahead.
constexpr int64_t prefetch_units(int blocks) { return blocks > 2 ? 128 / blocks : 96; }

// out[m * out_stride + 16 * b + i] = the product of row m of x with row i of block b. `w` is the first block, the
// others follow it; what is read after them is fetched towards the end. `more` adds to what `out` holds: of the units
// before these.
template <class W, int kRows, int kBlocks, bool kPanel>
void product(const Left& x, const uint32_t* w, int64_t block_units, float* out, int64_t out_stride, bool more) {
  using A = Arithmetic<W>;
  constexpr int64_t kPrefetchUnits = prefetch_units(kBlocks);
  typename A::Sum sum[kRows][kBlocks];
  TF_UNROLL
  for (int m = 0; m < kRows; m++) {
    TF_UNROLL
    for (int b = 0; b < kBlocks; b++) sum[m][b] = A::zero();
  }
  if (more) {
    TF_UNROLL
    for (int m = 0; m < kRows; m++) {
      TF_UNROLL
      for (int b = 0; b < kBlocks; b++) sum[m][b] = A::load(out + m * out_stride + b * kBlockRows);
    }
  }
  const int64_t block_stride = block_units * kBlockRows;
  const char* row[kRows];
  TF_UNROLL
  for (int m = 0; m < kRows; m++) row[m] = x.data + m * (kPanel ? 4 : x.row_bytes);
  constexpr int64_t kStep = kPanel ? 4 * panel_width(kRows) : 4;

  const auto add = [&](int64_t k, auto unit, const uint32_t* ahead) __attribute__((always_inline)) {
    typename A::Weights weights[kBlocks];
    TF_UNROLL
    for (int b = 0; b < kBlocks; b++) {
      weights[b] = A::weights(w + b * block_stride + k * kBlockRows);
      __builtin_prefetch(ahead + b * block_stride + k * kBlockRows);
    }
    TF_UNROLL
    for (int m = 0; m < kRows; m++) {
      const typename A::Value value = A::value(unit((kPanel ? row[0] + 4 * m : row[m]) + k * kStep));
      TF_UNROLL
      for (int b = 0; b < kBlocks; b++) A::add_product(sum[m][b], value, weights[b]);
    }
  };
  const int64_t near = x.units > kPrefetchUnits ? x.units - kPrefetchUnits : 0;
  const uint32_t* const ahead = w + kPrefetchUnits * kBlockRows;
  const uint32_t* const next = w + kBlocks * block_stride - near * kBlockRows;
  for (int64_t k = 0; k < near; k++) add(k, load_unit, ahead);
  for (int64_t k = near; k < x.units; k++) add(k, load_unit, next);
  if (x.half_unit) {
    const auto load_half = [](const char* p) {
      uint16_t half;
      std::memcpy(&half, p, 2);
      return static_cast<uint32_t>(half);
    };
    add(x.units, load_half, next);
  }

  TF_UNROLL
  for (int m = 0; m < kRows; m++) {
    TF_UNROLL
    for (int b = 0; b < kBlocks; b++) A::store(out + m * out_stride + b * kBlockRows, sum[m][b]);
  }
}

using Product = void (*)(const Left&, const uint32_t*, int64_t, float*, int64_t, bool);

// The product of so many rows and blocks, not more than there are registers for.
template <class W, int kRows = Arithmetic<W>::kMaxRows, int kBlocks = Arithmetic<W>::max_blocks(kRows)>
Product find_product(int64_t rows, int64_t blocks, bool panel) {
  using A = Arithmetic<W>;
  if (rows < kRows) {
    if constexpr (kRows > 1) return find_product<W, kRows - 1>(rows, blocks, panel);
  }
  if (blocks < kBlocks) {
    if constexpr (kBlocks > 1) return find_product<W, kRows, kBlocks - 1>(rows, blocks, panel);
  }
  if constexpr (kRows <= A::kMaxDirectRows) {
    if (!panel) return product<W, kRows, kBlocks, false>;
  }
  // Panels have nearly equal parts of more than kMaxDirectRows rows, each of at most kMaxRows, hence of at least half.
  constexpr int kMinPanelRows = (A::kMaxRows + 1) / 2;
  static_assert(A::kMaxDirectRows + 1 >= kMinPanelRows);
  if constexpr (kRows >= kMinPanelRows) return product<W, kRows, kBlocks, true>;
  return nullptr;
}

}  // namespace transfuse
