// The two products of attention in the tiles of AMX, sixteen rows at a time.
//
// Each number is a sum over tiles in ascending order, in one tile register. Whether keys or queries are the left side
// changes no bit of their product.
#pragma once

#include "attention_tile.h"
#include "tiles.h"

namespace transfuse::attention {

// Whether products of these words are computed in tiles. Rows then come in blocks of sixteen, and there is room for the
// last block's missing ones, whose numbers nobody uses; keys have words for whole tiles; and columns of keys come by
// twos, since a tile of weights has 32.
template <class Word>
constexpr bool kTiled = false;

// Lives while a thread multiplies words.
template <class Word>
struct ProductScope {};

#if defined(__AMX_BF16__)

template <>
inline constexpr bool kTiled<Pair> = true;

template <>
struct ProductScope<Pair> {
  const TileScope tiles{kTileRows};
};

// Tile registers: sums are 0 to 3, left sides 4 and 5, right sides 6 and 7.
template <int kColumn>
TF_INLINE void multiply_column(const Pair* b, int64_t b_stride) {
  tile_load<6 + kColumn % 2>(b + kColumn * kLanes, b_stride * 4);
  tile_multiply<kColumn, 4, 6 + kColumn % 2>();
}

// Adds to sixteen rows of 16 kColumns numbers, or to zeros, the product of `steps` words, a multiple of sixteen.
template <int kColumns, bool kFromZero>
TF_INLINE void multiply_tiles(const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride, int64_t steps,
                              float* out, int64_t out_stride) {
  static_assert(kColumns == 2 || kColumns == 4);
  if constexpr (kFromZero) {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (kColumns > 2) tile_zero<2>();
    if constexpr (kColumns > 2) tile_zero<3>();
  } else {
    tile_load<0>(out, out_stride * 4);
    tile_load<1>(out + kLanes, out_stride * 4);
    if constexpr (kColumns > 2) tile_load<2>(out + 2 * kLanes, out_stride * 4);
    if constexpr (kColumns > 2) tile_load<3>(out + 3 * kLanes, out_stride * 4);
  }
  for (int64_t step = 0; step < steps; step += kTileUnits) {
    tile_load<4>(a + step, a_stride * 4);
    multiply_column<0>(b + step * b_stride, b_stride);
    multiply_column<1>(b + step * b_stride, b_stride);
    if constexpr (kColumns > 2) multiply_column<2>(b + step * b_stride, b_stride);
    if constexpr (kColumns > 2) multiply_column<3>(b + step * b_stride, b_stride);
  }
  tile_store<0>(out, out_stride * 4);
  tile_store<1>(out + kLanes, out_stride * 4);
  if constexpr (kColumns > 2) tile_store<2>(out + 2 * kLanes, out_stride * 4);
  if constexpr (kColumns > 2) tile_store<3>(out + 3 * kLanes, out_stride * 4);
}

// As in attention_tile.h.
inline void score(int num_rows, const Pair* query, int64_t num_words, const Pair* keys, int begin, int end, float scale,
                  float* scores) {
  if (end - begin == kTileColumns) {
    multiply_tiles<4, true>(query, num_words, keys, kTileKeys, num_words, scores, kTileKeys);
  } else {
    multiply_tiles<2, true>(query, num_words, keys + begin * kLanes, kTileKeys, num_words, scores + begin * kLanes,
                            kTileKeys);
  }
  for (int m = 0; m < num_rows; m++)
    for (int column = begin; column < end; column++) {
      float* const to = scores + m * kTileKeys + column * kLanes;
      store(to, load(to) * broadcast(scale));
    }
}

inline void add_values(int num_rows, const Pair* weights, const Pair* values, int64_t stride, int begin, int end,
                       const float* alpha, float* acc) {
  for (int m = 0; m < num_rows; m++) {
    if (alpha[m] == 1.0f) continue;
    for (int64_t i = 0; i < stride; i += kLanes)
      store(acc + m * stride + i, load(acc + m * stride + i) * broadcast(alpha[m]));
  }
  const int64_t first = begin * kLanes / 2, steps = (end - begin) * kLanes / 2;
  int64_t i = 0;
  for (; i + 4 * kLanes <= stride; i += 4 * kLanes)
    multiply_tiles<4, false>(weights + first, kTileKeys / 2, values + first * stride + i, stride, steps, acc + i,
                             stride);
  if (i < stride)
    multiply_tiles<2, false>(weights + first, kTileKeys / 2, values + first * stride + i, stride, steps, acc + i,
                             stride);
}

// Sixteen keys as the left side of a product: where they lie, if that is row after row and their words fill whole
// tiles, or else copied to `copy`, with zeros behind them.
struct KeyTile {
  const Pair* words;
  int64_t stride;
};
inline KeyTile key_tile(const bf16* const* keys, int64_t size, int64_t num_words, Pair* copy) {
  const int64_t step = keys[1] - keys[0];
  bool even = size == 2 * num_words && step > 0 && step % 2 == 0;
  for (int k = 2; k < kLanes; k++) even &= keys[k] - keys[k - 1] == step;
  if (even) return {reinterpret_cast<const Pair*>(keys[0]), step / 2};
  for (int k = 0; k < kLanes; k++) {
    Pair* const to = copy + k * num_words;
    std::memset(static_cast<void*>(to + size / 2), 0, (num_words - size / 2) * sizeof(Pair));
    std::memcpy(static_cast<void*>(to), keys[k], size * sizeof(bf16));
  }
  return {copy, num_words};
}

// As `score`, of keys where they lie and of `query` [num_words][16]. `copy` has room for 64 keys.
inline void score_few(int num_rows, const Pair* query, int64_t num_words, const bf16* const* keys, int64_t size,
                      int begin, int end, float scale, Fetcher<bf16>& fetcher, Pair* copy, float* scores) {
  KeyTile left[kTileColumns];
  for (int column = begin; column < end; column++)
    left[column] = key_tile(keys + column * kLanes, size, num_words, copy + column * kLanes * num_words);
  alignas(64) float products[kTileColumns][kLanes * kLanes];
  for (int column = begin; column < end; column += 2) {
    const KeyTile &first = left[column], &second = left[column + 1];
    tile_zero<0>();
    tile_zero<1>();
    for (int64_t word = 0; word < num_words; word += kTileUnits) {
      fetcher.at_keys();
      tile_load<6>(query + word * kLanes, kLanes * 4);
      tile_load<4>(first.words + word, first.stride * 4);
      tile_multiply<0, 4, 6>();
      fetcher.at_keys();
      tile_load<5>(second.words + word, second.stride * 4);
      tile_multiply<1, 5, 6>();
    }
    tile_store<0>(products[column], kLanes * 4);
    tile_store<1>(products[column + 1], kLanes * 4);
  }
  for (int column = begin; column < end; column++) {
    f32x16 rows[kLanes];
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; k++) rows[k] = load(products[column] + k * kLanes);
    transpose(rows);
#pragma GCC unroll 16
    for (int m = 0; m < kLanes; m++)
      if (m < num_rows) store(scores + m * kTileKeys + column * kLanes, rows[m] * broadcast(scale));
  }
}

#endif

}  // namespace transfuse::attention
