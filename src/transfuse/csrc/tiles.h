// Tiles of AMX: eight registers of sixteen rows of 64 bytes, and products of two of them added to a third.
//
// The instructions are written out, since the compilers' own functions tell nobody that a load reads memory.
#pragma once

#if defined(__AMX_BF16__)

#include "vec.h"

namespace transfuse {

constexpr int64_t kTileRows = 16;
// Of a row. So many bytes are kTileUnits units, and kTileDepth bfloat16.
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kTileUnits = 16;
constexpr int64_t kTileDepth = 32;

template <int kTile>
TF_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows are `stride` bytes apart.
template <int kTile>
TF_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
TF_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

// Adds to each float32 of `kSum` the product of a row of bfloat16 of `kLeft` with a column of pairs of `kRight`. Numbers
// too small to be normal count as zero, and rounding is to the nearest, whatever the thread's settings are. The order in
// which a tile's products are added is the machine's, but the same for every row.
template <int kSum, int kLeft, int kRight>
TF_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

// While one lives, its thread's tiles can be used: 0 to 5, of which sums and left sides are made, have `rows` rows, 6
// and 7, for right sides, sixteen. What tiles hold makes switches between threads dearer, so none lives for long.
class TileScope {
 public:
  explicit TileScope(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) {
      config.row_bytes[tile] = kTileRowBytes;
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace transfuse

#endif
