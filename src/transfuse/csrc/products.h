// How products of rows of x with blocks of a packed weight are computed on this target.
#pragma once

#include <algorithm>

#include "microkernel.h"
#include "panel.h"
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

  Product find(int64_t rows, int64_t blocks, bool panel) const { return find_product<W>(rows, blocks, panel); }
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

  Product find(int64_t rows, int64_t blocks, bool) const {
    if (rows > kTileRows) return blocks > 1 ? tile_product<2, true> : tile_product<1, true>;
    constexpr Product products[] = {tile_product<1, false>, tile_product<2, false>, tile_product<3, false>,
                                    tile_product<4, false>};
    return products[blocks - 1];
  }

 private:
  int64_t depth_bytes(int64_t rows) const { return (rows > kTileRows ? kMaxRows : tile_rows_) * kTileRowBytes; }

  const int64_t tile_rows_;
};

#endif

}  // namespace transfuse
