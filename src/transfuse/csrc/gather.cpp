// Rows of a table, such as the embeddings of tokens.
//
// tensors: 0 table [V, H], or a packed linear weight, 1 index i64 [M], 2 out [M, H].
// ints: 0 whether the table is packed, 1 V of a packed table, 2 H, 3 type of the table, 4 encoding of a packed table. An
// index outside [0, V) fails the op with code 1.
#include "kernels.h"
#include "packed.h"
#include "short_bf16.h"
#include "team.h"
#include "vec.h"

namespace transfuse {

namespace {

template <class T, class Out>
void copy_row(const T* from, Out* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = from_float<Out>(to_float(from[i]));
}

// A lane of a block, of which `units` holds the first n values.
template <class T, class Out>
void copy_lane(const uint32_t* units, int64_t lane, Out* to, int64_t n) {
  constexpr int64_t kDepth = unit_depth(sizeof(T) == 2 ? kBFloat16 : kFloat32);
  const T* from = reinterpret_cast<const T*>(units + lane);
  for (int64_t i = 0; i < n; i++)
    to[i] = from_float<Out>(to_float(from[i / kDepth * kBlockRows * kDepth + i % kDepth]));
}

template <class T, class Out>
void copy_packed_row(const uint32_t* table, int64_t row, Out* to, int64_t n) {
  const int64_t units = num_units(n, sizeof(T) == 2 ? kBFloat16 : kFloat32);
  copy_lane<T>(table + row / kBlockRows * units * kBlockRows, row % kBlockRows, to, n);
}

template <class Out>
void copy_short_row(const ShortBf16& table, int64_t row, Out* to, int64_t n) {
  alignas(64) uint32_t units[kRunUnits * kBlockRows];
  for (int64_t run = 0, first = 0; first < n; run++, first += 2 * kRunUnits) {
    table.decode(row / kBlockRows, run, 1, units);
    copy_lane<bf16>(units, row % kBlockRows, to + first, std::min(n - first, 2 * kRunUnits));
  }
}

template <class T, class Out>
void gather(const Op& op, Team& team) {
  const Tensor &table = op.tensor[0], &index = op.tensor[1], &out = op.tensor[2];
  // A packed table does not say how many rows it has; others may have as many as the step has tokens.
  const int64_t num_rows = op.ints[0] != 0 ? op.ints[1] : table.size[0], n = op.ints[2];
  team.for_each(index.size[0], [&](int64_t m) {
    Out* const to = out.as<Out>() + m * out.stride[0];
    const int64_t row = index.as<int64_t>()[m * index.stride[0]];
    if (row < 0 || row >= num_rows) {
      team.fail(1);
      for (int64_t i = 0; i < n; i++) to[i] = from_float<Out>(0.0f);
    } else if (op.ints[4] == kShortBf16) {
      copy_short_row({table.data, num_blocks(num_rows, false), num_units(n, kBFloat16)}, row, to, n);
    } else if (op.ints[0] != 0) {
      copy_packed_row<T>(table.as<uint32_t>(), row, to, n);
    } else {
      copy_row(table.as<T>() + row * table.stride[0], to, n);
    }
  });
}

}  // namespace

void gather_rows(const Op& op, Team& team) {
  const bool narrow = op.ints[3] == kBFloat16, narrow_out = op.tensor[2].dtype == kBFloat16;
  if (narrow) return narrow_out ? gather<bf16, bf16>(op, team) : gather<bf16, float>(op, team);
  return narrow_out ? gather<float, bf16>(op, team) : gather<float, float>(op, team);
}

}  // namespace transfuse
