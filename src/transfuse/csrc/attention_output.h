// Where the results of attention go.
#pragma once

#include <cmath>
#include <cstring>

#include "attention_plan.h"
#include "attention_softmax.h"
#include "tensor_row.h"

namespace transfuse::attention {

// `stride` is that of the rows of results.
class Output {
 public:
  Output(const Op& op, const Lengths& lengths, int64_t stride)
      : lengths_(lengths), out_(op.tensor[7]), sinks_(op.tensor[6]), stride_(stride) {}

  // Divides an item's rows by the sums of their weights, sinks included, and writes them.
  void write(const Item& item, const RowStates& total) const {
    for (int r = 0; r < item.num_rows; r++) {
      const auto [token, head] = place_of(lengths_, item, r);
      float* acc = total.acc + r * stride_;
      const float factor = 1.0f / sum_with_sink(total, r, head);
      for (int64_t i = 0; i < stride_; i += kLanes) store(acc + i, load(acc + i) * broadcast(factor));
      write_row(out_, token * out_.stride[0] + head * out_.stride[1], out_.size[2], acc);
    }
  }

  // Zeros for a row of the step that no request has.
  void clear(int64_t token) const {
    const size_t size = item_size(out_.dtype);
    for (int64_t head = 0; head < out_.size[1]; head++)
      std::memset(out_.as<char>() + (token * out_.stride[0] + head * out_.stride[1]) * size, 0, out_.size[2] * size);
  }

 private:
  float sum_with_sink(const RowStates& total, int r, int64_t head) const {
    if (!sinks_) return total.sum[r];
    const float sink = number_at(sinks_, head * sinks_.stride[0]) * kLog2E;
    // A sink far above the scores makes this infinite, and the row 0.
    return total.sum[r] + std::exp2(sink - total.largest[r]);
  }

  const Lengths& lengths_;
  const Tensor out_, sinks_;
  const int64_t stride_;
};

}  // namespace transfuse::attention
