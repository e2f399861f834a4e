// Sums of products along one dimension, in float32 and rounded once: a step of a convolution or a recurrence, a mean.
//
// Tensors: 0 a, 1 b (absent: a alone is summed), 2 addend (or absent), 3 out, of up to 3 dimensions. a and b have those of
// out and one more behind them, which is summed over; the addend those of out. float32 and bfloat16 in any mixture, any
// strides; a stride of 0 repeats an element. Floats: 0 factor. out = factor * sum(a * b) + addend.
#include "kernels.h"
#include "strided.h"
#include "team.h"

namespace transfuse {

namespace {

// Products that one thread works on before it asks for more; fewer are not worth a second thread.
constexpr int64_t kChunk = 8192;

constexpr i32x16 lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The dimension that is summed over.
struct Summed {
  int64_t size;
  int64_t stride[2];  // of a and b
  float factor;
};

Tensor without_last(Tensor t) {
  if (t) t.dims--;
  return t;
}

Line along(const Line& line, int64_t element, int64_t stride) {
  return {line.data + element * line.stride * static_cast<int64_t>(item_size(line.dtype)), stride, line.dtype};
}

float number(const Line& line) { return read({line.data, 0, line.dtype}, 0, 1)[0]; }

// Each result by itself, sixteen products at a time.
void sum_along(const Line (&line)[4], int64_t n, const Summed& s) {
  const bool has_b = line[1].data != nullptr;
  for (int64_t i = 0; i < n; i++) {
    const Line a = along(line[0], i, s.stride[0]), b = has_b ? along(line[1], i, s.stride[1]) : Line{};
    f32x16 total{};
    for (int64_t k = 0; k < s.size; k += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, s.size - k);
      const f32x16 x = read(a, k, count);
      const f32x16 product = has_b ? x * read(b, k, count) : x;
      total += count == kLanes ? product : select(lane_numbers < static_cast<int32_t>(count), product, f32x16{});
    }
    const float addend = line[2].data != nullptr ? number(along(line[2], i, 0)) : 0.0f;
    write(along(line[3], i, 0), 0, 1, fma(broadcast(sum(total)), broadcast(s.factor), broadcast(addend)));
  }
}

// Sixteen results at once, product by product.
void sum_across(const Line (&line)[4], int64_t n, const Summed& s) {
  const bool has_b = line[1].data != nullptr;
  const int64_t step_a = s.stride[0] * static_cast<int64_t>(item_size(line[0].dtype));
  const int64_t step_b = has_b ? s.stride[1] * static_cast<int64_t>(item_size(line[1].dtype)) : 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, n - i);
    Line a = line[0], b = line[1];
    f32x16 total{};
    for (int64_t k = 0; k < s.size; k++) {
      const f32x16 x = read(a, i, count);
      total = has_b ? fma(x, read(b, i, count), total) : total + x;
      a.data += step_a;
      if (has_b) b.data += step_b;
    }
    const f32x16 addend = line[2].data != nullptr ? read(line[2], i, count) : f32x16{};
    write(line[3], i, count, fma(total, broadcast(s.factor), addend));
  }
}

}  // namespace

void sum_products(const Op& op, Team& team) {
  const Tensor &a = op.tensor[0], &b = op.tensor[1];
  const int last = a.dims - 1;
  const Summed s = {a.size[last], {a.stride[last], b ? b.stride[last] : 0}, static_cast<float>(op.floats[0])};
  // By what is summed over alone, so that a result does not depend on how many there are.
  const bool is_contiguous = s.stride[0] <= 1 && s.stride[1] <= 1 && s.stride[0] + s.stride[1] > 0;
  const Walk<4> walk({without_last(a), without_last(b), op.tensor[2], op.tensor[3]},
                     std::max<int64_t>(1, kChunk / std::max<int64_t>(1, s.size)));
  walk.run(team, [&](const Line(&line)[4], int64_t n) {
    is_contiguous ? sum_along(line, n, s) : sum_across(line, n, s);
  });
}

}  // namespace transfuse
