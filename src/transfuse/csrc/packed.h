// How the weight of a linear layer lies in memory once packed.
//
// Sixteen rows of W [N, K] (sixteen outputs) make a block; a block is a matrix of units [units, 16], a unit being the
// four bytes that one row has at one depth: one float32, or two bfloat16 that one instruction multiplies together. Rows
// beyond N, the second half of an odd K's last unit, and units beyond K are zeros. There are such where bfloat16 is
// multiplied in tiles, of which only whole ones are packed. A gated linear unit has blocks of gate and of up rows
// by turns, so that whoever computes a gate has its up at hand.
#pragma once

#include "op.h"
#include "tiles.h"

namespace transfuse {

// How the numbers of a packed weight are kept: as they are, or as short_bf16.h says.
enum Encoding : int32_t { kPlain = 0, kShortBf16 = 1 };

enum GluLayout : int32_t { kNoGlu = 0, kGluHalves = 1, kGluSwapped = 2, kGluInterleaved = 3 };

constexpr int64_t kBlockRows = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Values of K in a unit.
constexpr int64_t unit_depth(int32_t dtype) { return dtype == kBFloat16 ? 2 : 1; }

constexpr int64_t num_units(int64_t k, int32_t dtype) {
#if defined(__AMX_BF16__)
  if (dtype == kBFloat16) return ceil_div(k, kTileDepth) * kTileUnits;
#endif
  return ceil_div(k, unit_depth(dtype));
}

constexpr int64_t num_blocks(int64_t n, bool glu) {
  return glu ? 2 * ceil_div(n / 2, kBlockRows) : ceil_div(n, kBlockRows);
}

// Where a row of a block comes from in W, or -1 for a row of zeros.
inline int64_t source_row(int64_t block, int64_t lane, int64_t n, int32_t layout) {
  if (layout == kNoGlu) {
    const int64_t row = block * kBlockRows + lane;
    return row < n ? row : -1;
  }
  const int64_t half = n / 2, row = block / 2 * kBlockRows + lane;
  if (row >= half) return -1;
  const bool up = block % 2 != 0;
  if (layout == kGluInterleaved) return 2 * row + up;
  return up == (layout == kGluHalves) ? half + row : row;
}

}  // namespace transfuse
