// The left side of a product: x as it is, or the norm of x plus an addend.
#pragma once

#include "float_types.h"
#include "norm_row.h"
#include "vec.h"

namespace transfuse {

// Rows of norm(x + addend), rounded to the weight's type W.
template <class W>
class Prologue {
 public:
  // tensors and settings: see linear.cpp.
  Prologue(const Tensor& x, const Tensor& addend, const Tensor& sum_out, const NormSettings& norm, int64_t k)
      : x_(x), addend_(addend), sum_out_(sum_out), norm_(norm), k_(k) {}

  // Writes row m to `out`, and x + addend to `sum_out` if `keeps_sum`. `scratch` holds k values.
  void operator()(int64_t m, W* out, float* scratch, bool keeps_sum) const {
    with_floats(x_.data, x_.dtype, [&](const auto* x) {
      x += m * x_.stride[0];
      if (!addend_) return finish(x, out);
      // Without a `sum_out` the sum has the type of x.
      const bool keeps = sum_out_ && keeps_sum;
      void* const to = keeps ? sum_out_.data : scratch;
      with_floats(to, sum_out_ ? sum_out_.dtype : x_.dtype, [&](auto* sum) {
        if (keeps) sum += m * sum_out_.stride[0];
        with_floats(addend_.data, addend_.dtype,
                    [&](const auto* addend) { add_row(x, addend + m * addend_.stride[0], sum, k_); });
        finish(sum, out);
      });
    });
  }

 private:
  template <class X>
  void finish(const X* x, W* out) const {
    if (norm_.kind != kNoNorm) return norm_row(x, out, k_, norm_);
    int64_t i = 0;
    for (; i + kLanes <= k_; i += kLanes) store(out + i, load(x + i));
    if (i < k_) store_part(out + i, load_part(x + i, k_ - i), k_ - i);
  }

  const Tensor x_, addend_, sum_out_;
  const NormSettings norm_;
  const int64_t k_;
};

}  // namespace transfuse
