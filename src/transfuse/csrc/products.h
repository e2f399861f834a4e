// How products of rows of x with blocks of a packed weight are computed on this target.
#pragma once

#include <algorithm>

#include "microkernel.h"
#include "panel.h"
#include "short_bf16.h"
#include "tile_product.h"

namespace transfuse {

// In vector registers. A product is one of a row block, up to kMaxRows rows of which all but the last are a multiple of
// kRowGranule, with up to max_blocks(rows) blocks of weights of type W.
template <class W>
class Products : public Arithmetic<W> {
 public:
  static constexpr int64_t kRowGranule = 1;
  // Rows of x that stay in a core's second-level cache while weights pass by.
  static constexpr int64_t kPanelBytes = 256 << 10;
  // Weights that stay in a core's caches while the rows of the panel pass by. Not less than those of two blocks do, which
  // is best where the first-level cache holds no more.
  static constexpr int64_t kStripBytes = 0;
  // Operations of an item when arithmetic is what takes time: some 20 microseconds.
  static constexpr int64_t kItemOperations = 4 << 20;

  // Lives while a thread multiplies.
  struct Scope {};

  // Of an op with m rows in all.
  explicit Products(int64_t) {}

  Scope scope() const { return {}; }

  // Fills the panel of a row block, for x [rows, k]; products read it as `in_panel` says.
  void fill(const char* x, int64_t row_bytes, int64_t rows, int64_t k, char* panel) const {
    fill_panel(x, row_bytes, rows, k * sizeof(W), reinterpret_cast<uint32_t*>(panel));
  }
  Left in_panel(const char* panel, int64_t, int64_t units) const { return {panel, 0, units, false}; }

  // sums[m * stride + 16 * b + i] = the product of row m of a row block with row i of block b; those lie in memory as
  // rows of units, `block_units` from one to the next.
  template <class Meanwhile>
  void multiply(const Left& left, int64_t rows, bool panel, const uint32_t* weights, int64_t block_units, int64_t blocks,
                float* sums, int64_t stride, Meanwhile&) const {
    find_product<W>(rows, blocks, panel)(left, weights, block_units, sums, stride, false);
  }

  // The same with blocks from `first` on whose exponents are coded; leaves them decoded. Runs are decoded just before
  // they are used, and add to the same sums one after the other.
  template <class Meanwhile>
  void multiply(const Left& left, int64_t rows, bool panel, const ShortBf16& weights, int64_t first, int64_t blocks,
                const DecodedRuns& decoded, float* sums, int64_t stride, Meanwhile&) const {
    const Product product = find_product<W>(rows, blocks, panel);
    const int64_t unit_stride = panel ? 4 * panel_width(rows) : 4;
    for (int64_t run = 0; run < weights.runs(); run++) {
      for (int64_t b = 0; b < blocks; b++) weights.decode(first + b, run, blocks, decoded.at(b, run));
      const Left part = left.part(run * kRunUnits, kRunUnits, unit_stride);
      product(part, decoded.at(0, run), decoded.block_units, sums, stride, run > 0);
    }
  }
};

#if defined(__AMX_BF16__)

// In tiles, even of a single row: they add in another order than vectors do.
template <>
class Products<bf16> {
 public:
  static constexpr int64_t kMaxRows = 2 * kTileRows, kMaxDirectRows = 0, kRowGranule = kTileRows;
  static constexpr int64_t max_blocks(int64_t rows) { return rows <= kTileRows ? 4 : 2; }
  static constexpr int64_t kPanelBytes = 1 << 20;
  // Tiles come quickly enough from the second-level cache. Results of many blocks for the same rows lie side by side: few
  // pages of memory at a time.
  static constexpr int64_t kStripBytes = 512 << 10;
  static constexpr int64_t kItemOperations = 256 << 20;

  using Scope = TileScope;

  explicit Products(int64_t m) : tile_rows_(std::min(m, kTileRows)) {}

  Scope scope() const { return TileScope(tile_rows_); }

  void fill(const char* x, int64_t row_bytes, int64_t rows, int64_t k, char* panel) const {
    fill_tiles(x, row_bytes, rows, k * 2, depth_bytes(rows), panel);
  }
  Left in_panel(const char* panel, int64_t rows, int64_t units) const {
    return {panel, depth_bytes(rows), units, false};
  }

  template <class Meanwhile>
  void multiply(const Left& left, int64_t rows, bool, const uint32_t* weights, int64_t block_units, int64_t blocks,
                float* sums, int64_t stride, Meanwhile& meanwhile) const {
    tile_product(rows, blocks, left, PlainTiles<true>{weights, block_units}, PlainTiles<false>{weights, block_units},
                 sums, stride, meanwhile);
  }
  template <class Meanwhile>
  void multiply(const Left& left, int64_t rows, bool, const ShortBf16& weights, int64_t first, int64_t blocks,
                const DecodedRuns& decoded, float* sums, int64_t stride, Meanwhile& meanwhile) const {
    const ShortTiles tiles = {weights, first, blocks, decoded};
    tile_product(rows, blocks, left, tiles, tiles, sums, stride, meanwhile);
  }

 private:
  int64_t depth_bytes(int64_t rows) const { return (rows > kTileRows ? kMaxRows : tile_rows_) * kTileRowBytes; }

  const int64_t tile_rows_;
};

#endif

}  // namespace transfuse
