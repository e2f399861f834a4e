// From the dtype of a tensor to a type.
#pragma once

#include "op.h"

namespace transfuse {

// Calls f with a pointer of the type that `dtype` names, float32 or bfloat16.
template <class F>
inline void with_floats(void* data, int32_t dtype, F&& f) {
  if (dtype == kBFloat16) {
    f(static_cast<bf16*>(data));
  } else {
    f(static_cast<float*>(data));
  }
}

template <class F>
inline void with_floats(const void* data, int32_t dtype, F&& f) {
  if (dtype == kBFloat16) {
    f(static_cast<const bf16*>(data));
  } else {
    f(static_cast<const float*>(data));
  }
}

}  // namespace transfuse
