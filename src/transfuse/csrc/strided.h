// Walks through tensors of one shape and any strides, line by line.
#pragma once

#include <algorithm>
#include <type_traits>

#include "op.h"
#include "team.h"
#include "vec.h"

namespace transfuse {

// Elements along one dimension.
struct Line {
  char* data;
  int64_t stride;  // in elements
  int32_t dtype;
};

template <class T>
inline f32x16 gather_as(const char* data, int64_t stride, int64_t count) {
  float part[kLanes] = {};
  const T* from = reinterpret_cast<const T*>(data);
  for (int64_t i = 0; i < count; i++) {
    if constexpr (std::is_same_v<T, bf16>) {
      part[i] = to_float(from[i * stride]);
    } else {
      part[i] = static_cast<float>(from[i * stride]);
    }
  }
  return load(part);
}

__attribute__((noinline)) inline f32x16 gather(const Line& line, int64_t first, int64_t count) {
  const char* data = line.data + first * line.stride * static_cast<int64_t>(item_size(line.dtype));
  switch (line.dtype) {
    case kFloat32: return gather_as<float>(data, line.stride, count);
    case kBFloat16: return gather_as<bf16>(data, line.stride, count);
    case kInt64: return gather_as<int64_t>(data, line.stride, count);
    case kInt32: return gather_as<int32_t>(data, line.stride, count);
    default: return gather_as<uint8_t>(data, line.stride, count);
  }
}

// The `count` <= 16 elements from `first` on, as float32; the lanes beyond mean nothing.
TF_INLINE f32x16 read(const Line& line, int64_t first, int64_t count) {
  if (line.stride == 1 && line.dtype == kFloat32) {
    const float* from = reinterpret_cast<const float*>(line.data) + first;
    return count == kLanes ? load(from) : load_part(from, count);
  }
  if (line.stride == 1 && line.dtype == kBFloat16) {
    const bf16* from = reinterpret_cast<const bf16*>(line.data) + first;
    return count == kLanes ? load(from) : load_part(from, count);
  }
  if (line.stride == 0 && line.dtype == kFloat32) return broadcast(*reinterpret_cast<const float*>(line.data));
  if (line.stride == 0) return broadcast(gather(line, 0, 1)[0]);
  return gather(line, first, count);
}

// `line` is of float32 or bfloat16.
TF_INLINE void write(const Line& line, int64_t first, int64_t count, f32x16 v) {
  float* floats = reinterpret_cast<float*>(line.data) + first * line.stride;
  bf16* halves = reinterpret_cast<bf16*>(line.data) + first * line.stride;
  const bool is_float = line.dtype == kFloat32;
  if (line.stride == 1 && count == kLanes) return is_float ? store(floats, v) : store(halves, v);
  for (int64_t i = 0; i < count; i++) {
    if (is_float) {
      floats[i * line.stride] = v[i];
    } else {
      halves[i * line.stride] = to_bf16(v[i]);
    }
  }
}

// The lines of some tensors of equal sizes, the last of which is written. Dimensions that lie behind one another in
// every tensor are walked as one. A tensor that is not there has lines of no data.
template <int kTensors>
class Walk {
 public:
  Walk(const Tensor (&tensors)[kTensors], int64_t elements_per_chunk) {
    const Tensor& shape = tensors[kTensors - 1];
    for (int t = 0; t < kTensors; t++) base_[t] = {static_cast<char*>(tensors[t].data), 0, tensors[t].dtype};
    for (int d = 0; d < shape.dims; d++) add_dimension(tensors, d, shape.size[d]);
    for (int d = 0; d + 1 < dims_; d++) num_lines_ *= size_[d];
    length_ = dims_ > 0 ? size_[dims_ - 1] : 1;
    per_line_ = std::max<int64_t>(1, (length_ + elements_per_chunk - 1) / elements_per_chunk);
    // Pieces of a line that are multiples of 64 elements, so that two threads never write to one cache line.
    piece_ = ((length_ + per_line_ - 1) / per_line_ + 63) / 64 * 64;
    lines_per_chunk_ = per_line_ > 1 ? 1 : std::max<int64_t>(1, elements_per_chunk / std::max<int64_t>(1, length_));
  }

  // Calls f(lines, number of elements) for pieces that together are everything, on all threads.
  template <class F>
  void run(Team& team, F&& f) const {
    const int64_t num_groups = (num_lines_ + lines_per_chunk_ - 1) / lines_per_chunk_;
    team.for_each(num_groups * per_line_, [&](int64_t chunk) {
      const int64_t first = chunk / per_line_ * lines_per_chunk_, offset = chunk % per_line_ * piece_;
      const int64_t count = std::min(piece_, length_ - offset);
      if (count <= 0) return;
      Place place = place_of(first, offset);
      for (int64_t i = first; i < std::min(num_lines_, first + lines_per_chunk_); i++) {
        f(place.line, count);
        advance(place);
      }
    });
  }

 private:
  void add_dimension(const Tensor (&tensors)[kTensors], int d, int64_t size) {
    if (size == 1) return;
    bool follows = dims_ > 0;
    for (int t = 0; t < kTensors && follows; t++)
      follows = !tensors[t] || stride_[t][dims_ - 1] == tensors[t].stride[d] * size;
    if (follows) {
      size_[dims_ - 1] *= size;
    } else {
      size_[dims_++] = size;
    }
    for (int t = 0; t < kTensors; t++) stride_[t][dims_ - 1] = tensors[t] ? tensors[t].stride[d] : 0;
  }

  // A line of each tensor, and where it is in the dimensions before the last.
  struct Place {
    Line line[kTensors];
    int64_t index[kMaxDims];
  };

  Place place_of(int64_t number, int64_t offset) const {
    Place place = {};
    for (int d = dims_ - 2; d >= 0; d--) {
      place.index[d] = number % size_[d];
      number /= size_[d];
    }
    for (int t = 0; t < kTensors; t++) {
      Line& line = place.line[t] = base_[t];
      if (line.data == nullptr) continue;
      line.stride = dims_ > 0 ? stride_[t][dims_ - 1] : 1;
      int64_t elements = offset * line.stride;
      for (int d = 0; d < dims_ - 1; d++) elements += place.index[d] * stride_[t][d];
      line.data += elements * static_cast<int64_t>(item_size(line.dtype));
    }
    return place;
  }

  // To the next line.
  void advance(Place& place) const {
    for (int d = dims_ - 2; d >= 0; d--) {
      const bool is_last = ++place.index[d] == size_[d];
      const int64_t steps = is_last ? 1 - size_[d] : 1;
      for (int t = 0; t < kTensors; t++) {
        Line& line = place.line[t];
        if (line.data != nullptr) line.data += steps * stride_[t][d] * static_cast<int64_t>(item_size(line.dtype));
      }
      if (!is_last) return;
      place.index[d] = 0;
    }
  }

  Line base_[kTensors];
  int dims_ = 0;
  int64_t size_[kMaxDims] = {};
  int64_t stride_[kTensors][kMaxDims] = {};
  int64_t num_lines_ = 1;
  int64_t length_ = 1;
  int64_t per_line_ = 1;
  int64_t piece_ = 1;
  int64_t lines_per_chunk_ = 1;
};

}  // namespace transfuse
