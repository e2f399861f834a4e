// RMS and layer norm over the last dimension, with what comes before and after: a sum, a gate, offset weights.
//
// Tensors: 0 x [A, B, H] (the leading dimensions may lack, their strides are free), 1 weight [H] or [B, H], 2 bias (as
// the weight), 3 addend (as x), 4 out, 5 sum_out, 6 gate (as x); all but x and out are optional.
// Integers: 0 kind (NormKind), 1 the gate's activation, 2 whether the norm comes before the gate.
// Floats: 0 eps, 1 offset of the weight.
#include <algorithm>

#include "activations.h"
#include "float_types.h"
#include "kernels.h"
#include "norm_row.h"
#include "team.h"

namespace transfuse {

namespace {

// Numbers that one thread norms before it asks for more.
constexpr int64_t kChunk = 8192;

// A row of a tensor of up to three dimensions.
struct Row {
  void* data;
  int32_t dtype;
};

Row row_of(const Tensor& t, int64_t outer, int64_t inner) {
  int64_t offset = 0;
  if (t.dims >= 2) offset += inner * t.stride[t.dims - 2];
  if (t.dims >= 3) offset += outer * t.stride[t.dims - 3];
  return {t.as<char>() + offset * static_cast<int64_t>(item_size(t.dtype)), t.dtype};
}

void add_any(Row x, Row addend, Row sum, int64_t n) {
  with_floats(x.data, x.dtype, [&](const auto* a) {
    with_floats(addend.data, addend.dtype, [&](const auto* b) {
      with_floats(sum.data, sum.dtype, [&](auto* out) { add_row(a, b, out, n); });
    });
  });
}

void norm_any(Row x, Row out, int64_t n, const NormSettings& settings) {
  with_floats(x.data, x.dtype, [&](const auto* from) {
    with_floats(out.data, out.dtype, [&](auto* to) { norm_row(from, to, n, settings); });
  });
}

// opened = activation(gate), in float32.
void open_gate(Row gate, float* opened, int64_t n, int64_t activation) {
  with_floats(gate.data, gate.dtype, [&](const auto* from) {
    with_activation(activation, [&](auto kind) {
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(opened + i, activate<kind>(load(from + i)));
      if (i < n) store_part(opened + i, activate<kind>(load_part(from + i, n - i)), n - i);
    });
  });
}

// out = x * factor; `out` may be `x`.
void multiply(Row x, const float* factor, Row out, int64_t n) {
  with_floats(x.data, x.dtype, [&](const auto* from) {
    with_floats(out.data, out.dtype, [&](auto* to) {
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * load(factor + i));
      if (i < n) store_part(to + i, load_part(from + i, n - i) * load_part(factor + i, n - i), n - i);
    });
  });
}

// `wide` and `opened` are workspace of n numbers each.
void gated_norm(Row x, Row gate, Row out, int64_t n, const NormSettings& settings, const Op& op, float* wide,
                float* opened) {
  const Row between = {wide, kFloat32};
  open_gate(gate, opened, n, op.ints[1]);
  const bool norm_first = op.ints[2] != 0;
  if (norm_first) {
    norm_any(x, between, n, settings);
    multiply(between, opened, out, n);
  } else {
    multiply(x, opened, between, n);
    norm_any(between, out, n, settings);
  }
}

}  // namespace

void norm(const Op& op, Team& team) {
  const Tensor& x = op.tensor[0];
  const Tensor &weight = op.tensor[1], &bias = op.tensor[2], &addend = op.tensor[3];
  const Tensor &out = op.tensor[4], &sum_out = op.tensor[5], &gate = op.tensor[6];
  const int64_t n = x.size[x.dims - 1];
  const int64_t num_inner = x.dims >= 2 ? x.size[x.dims - 2] : 1;
  const int64_t num_rows = num_inner * (x.dims >= 3 ? x.size[x.dims - 3] : 1);
  const int64_t rows_per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, n));
  const bool is_float = addend && (x.dtype == kFloat32 || addend.dtype == kFloat32);
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;

  team.for_each((num_rows + rows_per_chunk - 1) / rows_per_chunk, [&](int64_t chunk) {
    float* total = reinterpret_cast<float*>(team.scratch(3 * padded * sizeof(float)));
    float *wide = total + padded, *opened = wide + padded;
    const int64_t end = std::min(num_rows, (chunk + 1) * rows_per_chunk);
    for (int64_t i = chunk * rows_per_chunk; i < end; i++) {
      const int64_t outer = i / num_inner, inner = i % num_inner;
      NormSettings settings = norm_settings(op.ints[0], op.floats[0], op.floats[1], weight, bias);
      if (weight) settings.weight = row_of(weight, 0, inner).data;
      if (bias) settings.bias = row_of(bias, 0, inner).data;
      Row row = row_of(x, outer, inner);
      if (addend) {
        const Row sum = sum_out ? row_of(sum_out, outer, inner) : Row{total, is_float ? kFloat32 : kBFloat16};
        add_any(row, row_of(addend, outer, inner), sum, n);
        row = sum;
      }
      const Row to = row_of(out, outer, inner);
      if (gate) {
        gated_norm(row, row_of(gate, outer, inner), to, n, settings, op, wide, opened);
      } else {
        norm_any(row, to, n, settings);
      }
    }
  });
}

}  // namespace transfuse
