// Memory that attention works in.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention_plan.h"

namespace transfuse::attention {

// Where partitions of split tiles wait for the others. One region runs at a time, so there is one workspace.
struct Workspace {
  std::vector<float> partials;
  std::unique_ptr<std::atomic<int32_t>[]> counters;  // all 0 between ops
  int32_t num_counters = 0;

  bool holds(const Plan& plan) const {
    return static_cast<int64_t>(partials.size()) >= plan.num_partials && num_counters >= plan.num_counters;
  }
  void grow(const Plan& plan) {
    if (static_cast<int64_t>(partials.size()) < plan.num_partials) partials.resize(plan.num_partials);
    if (num_counters >= plan.num_counters) return;
    counters.reset(new std::atomic<int32_t>[plan.num_counters]());
    num_counters = plan.num_counters;
  }
};

// Hands out pieces of a thread's scratch memory, or counts what is needed where it begins at null.
class Arena {
 public:
  template <class T>
  T* take(int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  void begin(char* base) {
    base_ = base;
    used_ = 0;
  }
  size_t used() const { return used_; }

 private:
  char* base_ = nullptr;
  size_t used_ = 0;
};

}  // namespace transfuse::attention
