// The products of attention in the tiles of AMX, sixteen rows at a time.
//
// Each number is a sum over tiles in ascending order, in one tile register, from zero. Whether keys or queries are the
// left side changes no bit of their product.
#pragma once

#include "attention_tile.h"
#include "tiles.h"

namespace transfuse::attention {

// Whether products of these words are computed in tiles, a partition of keys at a time (attention_partition.h). Rows
// then come in blocks of sixteen, and there is room for the last block's missing ones, whose numbers nobody uses; keys
// have words for whole tiles; and columns of keys come by twos, since a tile of weights has 32.
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

// Words of a tile.
constexpr int64_t kTileSize = kTileUnits * kLanes;

// Tile registers: sums are 0 to 3, left sides 4 and 5, right sides 6 and 7.
template <int kColumn>
TF_INLINE void multiply_column(const Pair* b) {
  tile_load<6 + kColumn % 2>(b, kTileRowBytes);
  tile_multiply<kColumn, 4, 6 + kColumn % 2>();
}

// Sixteen rows of 16 kColumns numbers: the product of `tiles` tiles of the left side, which lie in rows, with as many
// for each column, which lie one behind the other, those of one column `b_column` words before those of the next.
template <int kColumns>
TF_INLINE void multiply_tiles(const Pair* a, int64_t a_stride, const Pair* b, int64_t b_column, int64_t tiles,
                              float* out, int64_t out_stride) {
  static_assert(kColumns == 2 || kColumns == 4);
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (kColumns > 2) tile_zero<2>();
  if constexpr (kColumns > 2) tile_zero<3>();
  for (int64_t tile = 0; tile < tiles; tile++, a += kTileUnits, b += kTileSize) {
    tile_load<4>(a, a_stride * 4);
    multiply_column<0>(b);
    multiply_column<1>(b + b_column);
    if constexpr (kColumns > 2) multiply_column<2>(b + 2 * b_column);
    if constexpr (kColumns > 2) multiply_column<3>(b + 3 * b_column);
  }
  tile_store<0>(out, out_stride * 4);
  tile_store<1>(out + kLanes, out_stride * 4);
  if constexpr (kColumns > 2) tile_store<2>(out + 2 * kLanes, out_stride * 4);
  if constexpr (kColumns > 2) tile_store<3>(out + 3 * kLanes, out_stride * 4);
}

// The same of two or four columns.
inline void multiply_tiles(int64_t columns, const Pair* a, int64_t a_stride, const Pair* b, int64_t b_column,
                           int64_t tiles, float* out, int64_t out_stride) {
  if (columns == 4) return multiply_tiles<4>(a, a_stride, b, b_column, tiles, out, out_stride);
  multiply_tiles<2>(a, a_stride, b, b_column, tiles, out, out_stride);
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

// Products of up to sixteen rows of queries, given as `query` [num_words][16], with keys of columns [begin, end) of a
// tile where they lie. `copy` has room for 64 keys.
inline void score_few(int num_rows, const Pair* query, int64_t num_words, const bf16* const* keys, int64_t size,
                      int begin, int end, Fetcher<bf16>& fetcher, Pair* copy, float* scores, int64_t stride) {
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
      if (m < num_rows) store(scores + m * stride + column * kLanes, rows[m]);
  }
}

#endif

}  // namespace transfuse::attention
