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

namespace transfuse {

constexpr int64_t kTileWords = kTileRows * kTileUnits;

// Weights that are used once are fetched so many tiles ahead.
constexpr int64_t kPrefetchTiles = 1;

// Tile registers: sums are 0 to 3, left sides 4 and 5, right sides 6 and 7.
template <int kBlock, bool kTwo>
TF_INLINE void add_tile(const uint32_t* w) {
  constexpr int kRight = 6 + kBlock % 2;
  if constexpr (!kTwo) {
    TF_UNROLL
    for (int64_t i = 0; i < kTileRows; i++) __builtin_prefetch(w + kPrefetchTiles * kTileWords + i * kBlockRows);
  }
  tile_load<kRight>(w, kTileRowBytes);
  tile_multiply<kBlock, 4, kRight>();
  if constexpr (kTwo) tile_multiply<kBlock + 2, 5, kRight>();
}

// As `product` of microkernel.h; of up to sixteen rows, or of up to 32 if kTwo. The panel is tiles of rows, those of
// one depth `x.row_bytes` before those of the next.
template <int kBlocks, bool kTwo>
void tile_product(const Left& x, const uint32_t* w, int64_t block_units, float* out, int64_t out_stride) {
  static_assert(kBlocks <= (kTwo ? 2 : 4));
  const int64_t block_stride = block_units * kBlockRows;
  tile_zero<0>();
  if constexpr (kTwo || kBlocks > 2) tile_zero<2>();
  if constexpr (kBlocks > 1) tile_zero<1>();
  if constexpr (kBlocks > 3 || (kTwo && kBlocks > 1)) tile_zero<3>();
  const char* left = x.data;
  for (const uint32_t* const end = w + x.units * kBlockRows; w < end; w += kTileWords, left += x.row_bytes) {
    tile_load<4>(left, kTileRowBytes);
    if constexpr (kTwo) tile_load<5>(left + kTileRows * kTileRowBytes, kTileRowBytes);
    add_tile<0, kTwo>(w);
    if constexpr (kBlocks > 1) add_tile<1, kTwo>(w + block_stride);
    if constexpr (kBlocks > 2) add_tile<2, kTwo>(w + 2 * block_stride);
    if constexpr (kBlocks > 3) add_tile<3, kTwo>(w + 3 * block_stride);
  }
  const int64_t stride = out_stride * 4;
  float* const lower = kTwo ? out + kTileRows * out_stride : out + 2 * kBlockRows;
  tile_store<0>(out, stride);
  if constexpr (kBlocks > 1) tile_store<1>(out + kBlockRows, stride);
  if constexpr (kTwo || kBlocks > 2) tile_store<2>(lower, stride);
  if constexpr (kBlocks > 3 || (kTwo && kBlocks > 1)) tile_store<3>(lower + kBlockRows, stride);
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
