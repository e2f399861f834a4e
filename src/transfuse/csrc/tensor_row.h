// Rows of tensors of either dtype as float32.
#pragma once

#include "op.h"
#include "vec.h"

namespace transfuse {

// n rounded up to whole vectors.
inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

template <class T>
void read_row_as(const T* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store(to + i, load_part(from + i, n - i));
}

template <class T>
void write_row_as(const float* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store_part(to + i, load(from + i), n - i);
}

// n numbers from `offset` on, then zeros up to a multiple of 16.
inline void read_row(const Tensor& tensor, int64_t offset, int64_t n, float* to) {
  if (tensor.dtype == kBFloat16) {
    read_row_as(tensor.as<bf16>() + offset, n, to);
  } else {
    read_row_as(tensor.as<float>() + offset, n, to);
  }
}

// n numbers, rounded to the tensor's dtype; memory beyond is not touched.
inline void write_row(const Tensor& tensor, int64_t offset, int64_t n, const float* from) {
  if (tensor.dtype == kBFloat16) {
    write_row_as(from, n, tensor.as<bf16>() + offset);
  } else {
    write_row_as(from, n, tensor.as<float>() + offset);
  }
}

inline float number_at(const Tensor& tensor, int64_t offset) {
  return tensor.dtype == kBFloat16 ? to_float(tensor.as<bf16>()[offset]) : tensor.as<float>()[offset];
}

}  // namespace transfuse
