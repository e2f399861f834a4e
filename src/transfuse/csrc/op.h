// What the executor hands to a kernel: views of memory and the settings of one op.
#pragma once

#include <cstddef>
#include <cstdint>

namespace transfuse {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt64 = 2, kInt32 = 3, kBool = 4 };

// Bits of a bfloat16; arithmetic is done in float32.
struct bf16 {
  uint16_t bits;
};

constexpr int kMaxDims = 4;
constexpr int kMaxTensors = 14;
constexpr int kMaxInts = 12;
constexpr int kMaxFloats = 6;

// A view of memory that somebody else owns. Strides are in elements.
struct Tensor {
  void* data;  // null: an optional tensor that is not there
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];
  int32_t dtype;
  int32_t dims;

  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// One op with all its sizes known. What each tensor, integer and number means is said where its kernel is.
struct Op {
  int32_t kind;
  int32_t num_tensors;
  Tensor tensor[kMaxTensors];
  int64_t ints[kMaxInts];
  double floats[kMaxFloats];
};

inline size_t item_size(int32_t dtype) {
  constexpr size_t sizes[] = {4, 2, 8, 4, 1};
  return sizes[dtype];
}

class Team;

// A kernel: every thread of the team calls it with the same op. When it returns on one thread, the others may still be
// at work on it only if nothing of it is read by what follows: kernels end with a barrier (Team::for_each has one).
using Kernel = void (*)(const Op&, Team&);

struct KernelEntry {
  const char* name;
  Kernel run;
};

}  // namespace transfuse
