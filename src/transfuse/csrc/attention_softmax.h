// The softmax of a few rows over one tile of keys, and how results over separate keys become one.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attention_tile.h"
#include "vec_math.h"

namespace transfuse::attention {

constexpr float kLog2E = 1.44269504f;

// What softmax has come to for a row: the largest score, the sum of weights relative to it, the weighted values.
struct RowStates {
  float* largest;  // [rows]
  float* sum;      // [rows]
  float* acc;      // [rows][stride]
};

// Number `index` of those of `rows` rows each that lie one behind the other from `base` on.
inline RowStates states_at(float* base, int64_t index, int64_t rows, int64_t stride) {
  base += index * rows * (stride + 2);
  return {base, base + rows, base + 2 * rows};
}

// A row's query position and the keys that it sees of a tile or a partition, counted from its first.
struct RowView {
  int64_t position;
  int32_t first, last;

  // Turns to so many keys, the first of them at `origin`; a window of 0 shows all keys up to the query.
  void look_at(int64_t origin, int64_t num_keys, int64_t window) {
    const int64_t oldest = window > 0 ? position - window + 1 - origin : 0;
    first = static_cast<int32_t>(std::clamp<int64_t>(oldest, 0, num_keys));
    last = static_cast<int32_t>(std::clamp<int64_t>(position + 1 - origin, 0, num_keys));
  }
};

// Columns [begin, end) of a tile's keys.
struct Columns {
  int begin, end;
};

// Those that keys [first, last), counted from the tile's first, lie in, extended to multiples of `step`.
inline Columns columns_of(int64_t first, int64_t last, int step) {
  const int64_t width = step * kLanes;
  return {static_cast<int>(first / width) * step, static_cast<int>((last + width - 1) / width) * step};
}

// What softmax works on for the rows of a block and a tile's columns [begin, end) of keys.
struct Block {
  int num_rows;
  int begin, end;
  bool masked;           // whether a row does not see all of these keys
  int64_t position;      // of the tile's first key
  const RowView* view;   // [num_rows]
  const float* slope;    // ALiBi slope of each row, times log2(e); or null (https://arxiv.org/abs/2108.12409)
  float* scores;         // [num_rows][kTileKeys]
  float* largest;        // [num_rows], of all scores so far
  float* lane_sums;      // [num_rows][16], of all weights so far
  float* alpha;          // [num_rows], gets the factors of what was summed before
};

// Scores of a row, softcap, ALiBi and mask done, from scaled products.
template <int N>
TF_INLINE void finish_scores(const Block& block, int m, float softcap, f32x16 (&x)[N]) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const RowView& view = block.view[m];
  for (int n = 0; n < N; n++) {
    const i32x16 key = lane + (block.begin + n) * kLanes;
    if (softcap != 0) x[n] = transfuse::tanh(x[n]) * broadcast(softcap);
    if (block.slope != nullptr) {
      const i32x16 distance = key + static_cast<int32_t>(block.position - view.position);
      x[n] = fma(__builtin_convertvector(distance, f32x16), broadcast(block.slope[m]), x[n]);
    }
    if (block.masked) x[n] = select((key >= view.first) & (key < view.last), x[n], broadcast(-INFINITY));
  }
}

// Turns scaled products into weights over N columns of keys. A row that sees none of these keys is left exactly as it
// was.
template <class Word, int N, bool kPlain>
void softmax_columns(const Block& block, float softcap, Word* weights) {
  float change[kLanes] = {}, factor[kLanes];
  for (int m = 0; m < block.num_rows; m++) {
    float* row = block.scores + m * kTileKeys + block.begin * kLanes;
    f32x16 x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) x[n] = load(row + n * kLanes);
    if constexpr (!kPlain) {
      finish_scores<N>(block, m, softcap, x);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) store(row + n * kLanes, x[n]);
    }
    f32x16 high = x[0];
#pragma GCC unroll 4
    for (int n = 1; n < N; n++) high = max(high, x[n]);
    const float before = block.largest[m], now = largest(high);
    block.largest[m] = now > before ? now : before;
    change[m] = before - block.largest[m];
  }
  store(factor, exp2(load(change)));
  for (int m = 0; m < block.num_rows; m++) {
    const int64_t offset = m * kTileKeys + block.begin * kLanes;
    const f32x16 reference = broadcast(block.largest[m]);
    f32x16 weight[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      weight[n] = weight_of<Word>(load(block.scores + offset + n * kLanes) - reference);
      if constexpr (kWidth<Word> == 1) {
        store(weights + offset + n * kLanes, weight[n]);
      } else {
        store(reinterpret_cast<bf16*>(weights) + offset + n * kLanes, weight[n]);
      }
    }
    // In ascending order, so that columns which this block leaves out add nothing to no sum.
    f32x16 sums = weight[0];
#pragma GCC unroll 4
    for (int n = 1; n < N; n++) sums += weight[n];
    block.alpha[m] = factor[m];
    float* lane_sums = block.lane_sums + m * kLanes;
    store(lane_sums, fma(load(lane_sums), broadcast(factor[m]), sums));
  }
}

template <class Word>
void softmax(const Block& block, float softcap, Word* weights) {
  const bool plain = softcap == 0 && block.slope == nullptr && !block.masked;
  with_constant<1, kTileColumns>(block.end - block.begin, [&](auto columns) {
    if (plain) {
      softmax_columns<Word, columns(), true>(block, softcap, weights);
    } else {
      softmax_columns<Word, columns(), false>(block, softcap, weights);
    }
  });
}

// Adds to `total` what softmax gave over other keys. With keys that no row sees, `total` stays as it was, to the bit.
inline void merge(int num_rows, int64_t stride, const RowStates& total, const RowStates& other) {
  for (int first = 0; first < num_rows; first += kLanes) {
    const int count = std::min(num_rows - first, kLanes);
    const f32x16 before = load_part(total.largest + first, count), added = load_part(other.largest + first, count);
    const f32x16 now = select(added > before, added, before);
    const f32x16 keep = exp2(before - now), add = exp2(added - now);
    store_part(total.largest + first, now, count);
    store_part(total.sum + first,
               load_part(total.sum + first, count) * keep + load_part(other.sum + first, count) * add, count);
    float keeps[kLanes], adds[kLanes];
    store(keeps, keep);
    store(adds, add);
    for (int m = 0; m < count; m++) {
      float* const to = total.acc + (first + m) * stride;
      const float* const from = other.acc + (first + m) * stride;
      for (int64_t i = 0; i < stride; i += kLanes)
        store(to + i, fma(load(from + i), broadcast(adds[m]), load(to + i) * broadcast(keeps[m])));
    }
  }
}

// Rows over no key at all.
inline void clear(int num_rows, int64_t stride, const RowStates& states) {
  for (int m = 0; m < num_rows; m++) states.largest[m] = -FLT_MAX;
  std::memset(states.sum, 0, num_rows * sizeof(float));
  std::memset(states.acc, 0, num_rows * stride * sizeof(float));
}

}  // namespace transfuse::attention
