// Puts rows of x next to one another, unit by unit, so that a product of many rows reads one stream.
#pragma once

#include "microkernel.h"
#include "vec.h"

namespace transfuse {

typedef uint32_t u32x4 __attribute__((vector_size(16)));

TF_INLINE u32x4 load_units(const char* p) {
  u32x4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Writes four units of four rows: unit i goes to panel + i * width.
TF_INLINE void transpose_units(const char* const* row, uint32_t* panel, int64_t width) {
  const u32x4 a = load_units(row[0]), b = load_units(row[1]), c = load_units(row[2]), d = load_units(row[3]);
  const u32x4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const u32x4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const u32x4 columns[] = {
      __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5), __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
      __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) std::memcpy(panel + i * width, &columns[i], sizeof columns[i]);
}

// Fills panel [units, panel_width(rows)] from `rows` rows of `bytes` bytes each. The columns beyond `rows` repeat the
// last row: nobody uses what they give.
inline void fill_panel(const char* x, int64_t row_bytes, int64_t rows, int64_t bytes, uint32_t* panel) {
  const int64_t width = panel_width(rows), units = (bytes + 3) / 4;
  for (int64_t first = 0; first < width; first += 4) {
    const char* row[4];
    for (int64_t i = 0; i < 4; i++) row[i] = x + (first + i < rows ? first + i : rows - 1) * row_bytes;
    int64_t unit = 0;
    for (; unit + 4 <= bytes / 4; unit += 4) {
      const char* at[4];
      for (int i = 0; i < 4; i++) at[i] = row[i] + unit * 4;
      transpose_units(at, panel + unit * width + first, width);
    }
    for (; unit < units; unit++) {
      for (int64_t i = 0; i < 4; i++) {
        uint32_t value = 0;
        std::memcpy(&value, row[i] + unit * 4, bytes - unit * 4 < 4 ? bytes - unit * 4 : 4);
        panel[unit * width + first + i] = value;
      }
    }
  }
}

}  // namespace transfuse
