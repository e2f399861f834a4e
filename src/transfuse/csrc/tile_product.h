// Products of up to 32 rows of x with a few blocks of a packed bfloat16 weight, in the tiles of AMX.
//
// Sixteen units of a block are a tile as they lie in memory. Every output is a sum over K, tile by tile, in one tile
// register, whatever the number of rows and blocks: so a row's bits depend on nothing else.
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cstring>

#include "microkernel.h"
#include "short_bf16.h"

namespace transfuse {

constexpr int64_t kTileWords = kTileRows * kTileUnits;

// Weights that are used once are fetched so many tiles ahead.
constexpr int64_t kPrefetchTiles = 1;

// Tiles of blocks as they lie in memory; `kOnce` says that nobody reads them again soon.
template <bool kOnce>
struct PlainTiles {
  const uint32_t* data;
  int64_t block_units;

  TF_INLINE const uint32_t* operator()(int64_t block, int64_t depth) const {
    const uint32_t* const tile = data + block * block_units * kBlockRows + depth * kTileWords;
    if constexpr (kOnce) {
      TF_UNROLL
      for (int64_t i = 0; i < kTileRows; i++) __builtin_prefetch(tile + kPrefetchTiles * kTileWords + i * kBlockRows);
    }
    return tile;
  }
};

// Tiles of `count` blocks from `first` on, whose exponents are coded.
struct ShortTiles {
  const ShortBf16& weights;
  int64_t first, count;
  DecodedRuns decoded;

  TF_INLINE const uint32_t* operator()(int64_t block, int64_t depth) const {
    uint32_t* const tile = decoded.at(block, depth);
    weights.decode(first + block, depth, count, tile);
    return tile;
  }
};
static_assert(kRunUnits == kTileUnits);

// Tile registers: sums are 0 to 3, left sides 4 and 5, right sides 6 and 7.
template <int kBlock, bool kTwo>
TF_INLINE void add_tile(const uint32_t* w) {
  constexpr int kRight = 6 + kBlock % 2;
  tile_load<kRight>(w, kTileRowBytes);
  tile_multiply<kBlock, 4, kRight>();
  if constexpr (kTwo) tile_multiply<kBlock + 2, 5, kRight>();
}

// out[m * out_stride + 16 * b + i] = the product of row m of x with row i of block b; of up to sixteen rows, or of up to
// 32 if kTwo. The panel is tiles of rows, those of one depth `x.row_bytes` before those of the next. `meanwhile` is
// called at each depth, for what vector registers do while tiles are multiplied.
template <int kBlocks, bool kTwo, class Tiles, class Meanwhile>
void tile_product(const Left& x, const Tiles tiles, float* out, int64_t out_stride, Meanwhile& meanwhile) {
  static_assert(kBlocks <= (kTwo ? 2 : 4));
  tile_zero<0>();
  if constexpr (kTwo || kBlocks > 2) tile_zero<2>();
  if constexpr (kBlocks > 1) tile_zero<1>();
  if constexpr (kBlocks > 3 || (kTwo && kBlocks > 1)) tile_zero<3>();
  const char* left = x.data;
  const int64_t depths = x.units / kTileUnits;
  for (int64_t depth = 0; depth < depths; depth++, left += x.row_bytes) {
    tile_load<4>(left, kTileRowBytes);
    if constexpr (kTwo) tile_load<5>(left + kTileRows * kTileRowBytes, kTileRowBytes);
    add_tile<0, kTwo>(tiles(0, depth));
    if constexpr (kBlocks > 1) add_tile<1, kTwo>(tiles(1, depth));
    if constexpr (kBlocks > 2) add_tile<2, kTwo>(tiles(2, depth));
    if constexpr (kBlocks > 3) add_tile<3, kTwo>(tiles(3, depth));
    meanwhile();
  }
  const int64_t stride = out_stride * 4;
  float* const lower = kTwo ? out + kTileRows * out_stride : out + 2 * kBlockRows;
  tile_store<0>(out, stride);
  if constexpr (kBlocks > 1) tile_store<1>(out + kBlockRows, stride);
  if constexpr (kTwo || kBlocks > 2) tile_store<2>(lower, stride);
  if constexpr (kBlocks > 3 || (kTwo && kBlocks > 1)) tile_store<3>(lower + kBlockRows, stride);
}

// The same of so many rows and blocks.
template <class Tiles, class TilesOfMany, class Meanwhile>
void tile_product(int64_t rows, int64_t blocks, const Left& x, const Tiles& tiles, const TilesOfMany& tiles_of_many,
                  float* out, int64_t out_stride, Meanwhile& meanwhile) {
  if (rows > kTileRows) {
    return blocks > 1 ? tile_product<2, true>(x, tiles_of_many, out, out_stride, meanwhile)
                      : tile_product<1, true>(x, tiles_of_many, out, out_stride, meanwhile);
  }
  switch (blocks) {
    case 1:
      return tile_product<1, false>(x, tiles, out, out_stride, meanwhile);
    case 2:
      return tile_product<2, false>(x, tiles, out, out_stride, meanwhile);
    case 3:
      return tile_product<3, false>(x, tiles, out, out_stride, meanwhile);
    default:
      return tile_product<4, false>(x, tiles, out, out_stride, meanwhile);
  }
}

// Fills a panel with `rows` rows of `bytes` bytes each, and zeros up to whole tiles of K. What tiles hold beyond `rows`
// is left as it was: nobody uses what it gives.
inline void fill_tiles(const char* x, int64_t row_bytes, int64_t rows, int64_t bytes, int64_t depth_bytes,
                       char* panel) {
  for (int64_t m = 0; m < rows; m++) {
    const char* const row = x + m * row_bytes;
    char* to = panel + m * kTileRowBytes;
    int64_t i = 0;
    for (; i + kTileRowBytes <= bytes; i += kTileRowBytes, to += depth_bytes) std::memcpy(to, row + i, kTileRowBytes);
    if (i == bytes) continue;
    std::memset(to, 0, kTileRowBytes);
    std::memcpy(to, row + i, bytes - i);
  }
}

}  // namespace transfuse

#endif
