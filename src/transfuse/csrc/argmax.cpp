// The most likely token of each row.
//
// Tensors: 0 logits [S, V] (float32 or bfloat16, row stride free), 1 token i64 [S]: the lowest id of the highest logit,
// 2 finite i32 [S]: 0 where the row holds NaN or +inf, or nothing but -inf.
#include "float_types.h"
#include "kernels.h"
#include "row_scan.h"
#include "team.h"

namespace transfuse {

namespace {

template <class T>
int64_t first_equal(const T* row, int64_t n, float value) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const uint32_t bits = mask_bits(load(row + i) == broadcast(value));
    if (bits != 0) return i + __builtin_ctz(bits);
  }
  for (; i < n; i++)
    if (to_float(row[i]) == value) return i;
  return 0;
}

}  // namespace

void argmax(const Op& op, Team& team) {
  const Tensor& logits = op.tensor[0];
  int64_t* token = op.tensor[1].as<int64_t>();
  int32_t* finite = op.tensor[2].as<int32_t>();
  const int64_t n = logits.size[1];
  team.for_each(logits.size[0], [&](int64_t i) {
    const char* data = logits.as<char>() + i * logits.stride[0] * static_cast<int64_t>(item_size(logits.dtype));
    with_floats(data, logits.dtype, [&](const auto* row) {
      const RowMax highest = row_max(row, n);
      token[i] = first_equal(row, n, highest.value);
      finite[i] = highest.is_finite;
    });
  });
}

}  // namespace transfuse
