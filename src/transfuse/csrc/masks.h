// Which tokens of a row may be chosen.
#pragma once

#include "float_types.h"
#include "row_scan.h"

namespace transfuse {

// Masks [M, W] of W sixteens of bits, lowest bit first: a bit is set for each token that may be chosen.
struct Masks {
  const uint16_t* bits;
  int64_t width;

  // None where the index is negative.
  const uint16_t* at(int64_t index) const { return index < 0 ? nullptr : bits + index * width; }
};

// Calls f with a row of logits [S, V], float32 or bfloat16: a pointer to it, or a `MaskedRow` where there is a mask.
template <class F>
void with_row(const Tensor& logits, int64_t index, const uint16_t* mask, F&& f) {
  const char* data = logits.as<char>() + index * logits.stride[0] * static_cast<int64_t>(item_size(logits.dtype));
  with_floats(data, logits.dtype, [&](const auto* row) {
    if (mask == nullptr) {
      f(row);
    } else {
      f(mask_row(row, mask));
    }
  });
}

}  // namespace transfuse
