// What becomes of a product's sums: bias, activation, gated linear unit, residual, rounding.
#pragma once

#include "activations.h"
#include "float_types.h"
#include "packed.h"
#include "vec.h"

namespace transfuse {

// Where the sums of some rows and blocks belong. Block `first_block` begins at `sums`; rows are `stride` floats apart.
struct SumTile {
  float* sums;
  int64_t stride;
  int64_t first_row, num_rows;
  int64_t first_block, num_blocks;
};

class Epilogue {
 public:
  // tensors and settings: see linear.cpp.
  Epilogue(const Tensor& bias, const Tensor& residual, const Tensor& out, int64_t n, int64_t activation,
           int64_t glu_layout, float limit, float offset)
      : bias_(bias),
        residual_(residual),
        out_(out),
        n_(n),
        layout_(static_cast<int32_t>(glu_layout)),
        limit_(limit),
        offset_(offset),
        blocks_per_column_(glu_layout == kNoGlu ? 1 : 2),
        num_columns_(n / blocks_per_column_) {
    with_activation(activation, [&](auto number) {
      constexpr int32_t kNumber = decltype(number)::value;
      activate_ = glu_layout == kNoGlu ? &Epilogue::activate_plain<kNumber> : &Epilogue::activate_glu<kNumber>;
      if (glu_layout == kNoGlu && kNumber == kIdentity && !bias) activate_ = nullptr;
    });
  }

  // Finishes the tile, whose sums are not needed any more then.
  void operator()(const SumTile& tile) const {
    if (activate_ != nullptr) (this->*activate_)(tile);
    with_floats(out_.data, out_.dtype, [&](auto* out) {
      if (!residual_) return put(tile, out, static_cast<const float*>(nullptr));
      with_floats(residual_.data, residual_.dtype, [&](auto* residual) { put(tile, out, residual); });
    });
  }

  // Has the residual of the tile and the place of its results on their way: their rows lie too far apart for the
  // processor to guess, and a store waits until its line is there. Inlined, since a compiler takes a call of a function
  // that does nothing else for one of no effect.
  TF_INLINE void prefetch(const SumTile& tile) const {
    if (residual_ && residual_.data != out_.data)
      for_each_line(tile, residual_, [](const char* p) { __builtin_prefetch(p); });
    for_each_line(tile, out_, [](const char* p) { __builtin_prefetch(p, 1); });
  }

 private:
  // Calls f for each cache line of a tensor [M, Nout] where the results of the tile belong.
  template <class F>
  TF_INLINE void for_each_line(const SumTile& tile, const Tensor& tensor, F&& f) const {
    const int64_t item = static_cast<int64_t>(item_size(tensor.dtype));
    const int64_t column = tile.first_block / blocks_per_column_ * kBlockRows;
    const int64_t bytes = tile.num_blocks / blocks_per_column_ * kBlockRows * item;
    for (int64_t m = 0; m < tile.num_rows; m++) {
      const char* const row = tensor.as<char>() + ((tile.first_row + m) * tensor.stride[0] + column) * item;
      for (int64_t i = 0; i < bytes; i += 64) f(row + i);
    }
  }

  // How many numbers there are in the column of outputs that begins at `column`.
  int64_t column_width(int64_t column) const {
    return num_columns_ - column < kBlockRows ? num_columns_ - column : kBlockRows;
  }

  template <int32_t kActivation>
  void activate_plain(const SumTile& tile) const {
    for (int64_t block = 0; block < tile.num_blocks; block++) {
      const f32x16 bias = bias_of(tile.first_block + block);
      for (int64_t m = 0; m < tile.num_rows; m++) {
        float* const sums = tile.sums + m * tile.stride + block * kBlockRows;
        store(sums, activate<kActivation>(load(sums) + bias));
      }
    }
  }

  // Leaves the result where the gate was.
  template <int32_t kActivation>
  void activate_glu(const SumTile& tile) const {
    for (int64_t block = 0; block < tile.num_blocks; block += 2) {
      const f32x16 gate_bias = bias_of(tile.first_block + block), up_bias = bias_of(tile.first_block + block + 1);
      for (int64_t m = 0; m < tile.num_rows; m++) {
        float* const sums = tile.sums + m * tile.stride + block * kBlockRows;
        // In this order of arguments NaN stays NaN.
        const f32x16 gate = min(broadcast(limit_), load(sums) + gate_bias);
        const f32x16 up = max(broadcast(-limit_), min(broadcast(limit_), load(sums + kBlockRows) + up_bias));
        store(sums, activate<kActivation>(gate) * (up + offset_));
      }
    }
  }

  // Adds the residual, if any, rounds and stores.
  template <class Out, class Residual>
  void put(const SumTile& tile, Out* out, const Residual* residual) const {
    for (int64_t block = 0; block < tile.num_blocks; block += blocks_per_column_) {
      const int64_t column = (tile.first_block + block) / blocks_per_column_ * kBlockRows;
      const int64_t width = column_width(column);
      for (int64_t m = 0; m < tile.num_rows; m++) {
        f32x16 v = load(tile.sums + m * tile.stride + block * kBlockRows);
        Out* const to = out + (tile.first_row + m) * out_.stride[0] + column;
        if (residual != nullptr) {
          const Residual* const from = residual + (tile.first_row + m) * residual_.stride[0] + column;
          v = (width == kBlockRows ? load(from) : load_part(from, width)) + v;
        }
        if (width == kBlockRows) {
          store(to, v);
        } else {
          store_part(to, v, width);
        }
      }
    }
  }

  // Bias is in the order of the rows of W, wherever the packed weight has put them.
  f32x16 bias_of(int64_t block) const {
    float part[kLanes] = {};
    if (!bias_) return load(part);
    const int64_t width = column_width(block / blocks_per_column_ * kBlockRows);
    with_floats(bias_.data, bias_.dtype, [&](const auto* bias) {
      const auto* const from = bias + source_row(block, 0, n_, layout_);
      const int64_t step = layout_ == kGluInterleaved ? 2 : 1;
      for (int64_t i = 0; i < width; i++) part[i] = to_float(from[i * step]);
    });
    return load(part);
  }

  const Tensor bias_, residual_, out_;
  const int64_t n_;
  const int32_t layout_;
  const float limit_, offset_;
  const int64_t blocks_per_column_;
  const int64_t num_columns_;  // of outputs
  void (Epilogue::*activate_)(const SumTile&) const;
};

}  // namespace transfuse
