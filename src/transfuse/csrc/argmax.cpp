// The most likely token of each of some rows.
//
// Tensors: 0 logits [S, V] (float32 or bfloat16, row stride free), 1 rows i64 [n], 2 their masks i64 [n]: an index, or -1
// for none, 3 token i64 [n]: the lowest id of the highest logit, 4 finite i32 [n]: 0 where what may be chosen holds NaN or
// +inf, or nothing but -inf, 5 masks [M, W], see masks.h. Integers: 0 W.
#include "kernels.h"
#include "masks.h"
#include "team.h"

namespace transfuse {

namespace {

template <class Row>
int64_t first_equal(Row row, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 v = i + kLanes <= n ? load(row + i) : load_part(row + i, n - i);
    uint32_t bits = mask_bits(v == broadcast(value));
    if (n - i < kLanes) bits &= (1u << (n - i)) - 1;
    if (bits != 0) return i + __builtin_ctz(bits);
  }
  return 0;
}

}  // namespace

void argmax(const Op& op, Team& team) {
  const Tensor& logits = op.tensor[0];
  const int64_t *rows = op.tensor[1].as<int64_t>(), *mask = op.tensor[2].as<int64_t>();
  int64_t* token = op.tensor[3].as<int64_t>();
  int32_t* finite = op.tensor[4].as<int32_t>();
  const Masks masks = {op.tensor[5].as<uint16_t>(), op.ints[0]};
  const int64_t n = logits.size[1];
  team.for_each(op.tensor[1].size[0], [&](int64_t i) {
    with_row(logits, rows[i], masks.at(mask[i]), [&](auto row) {
      const RowMax highest = row_max(row, n);
      token[i] = first_equal(row, n, highest.value);
      finite[i] = highest.is_finite;
    });
  });
}

}  // namespace transfuse
