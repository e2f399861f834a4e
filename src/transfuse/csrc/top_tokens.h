// The most likely tokens of a row in the total order: higher logits first, and of equal ones the lower id.
#pragma once

#include <algorithm>
#include <cstdint>

#include "row_scan.h"

namespace transfuse {

// A logit and its id as one number; smaller ones come first in the order.
class RankedToken {
 public:
  RankedToken() = default;
  RankedToken(float logit, int64_t id) {
    logit += 0.0f;  // -0 and 0 are equal
    uint32_t bits;
    std::memcpy(&bits, &logit, sizeof bits);
    const uint32_t descending = bits >> 31 ? bits : ~bits & 0x7fffffff;
    key_ = static_cast<uint64_t>(descending) << 32 | static_cast<uint64_t>(id);
  }

  int64_t id() const { return static_cast<int64_t>(key_ & 0xffffffff); }
  float logit() const {
    const auto descending = static_cast<uint32_t>(key_ >> 32);
    const uint32_t bits = descending >> 31 ? descending : ~descending & 0x7fffffff;
    float logit;
    std::memcpy(&logit, &bits, sizeof logit);
    return logit;
  }
  bool operator<(const RankedToken& other) const { return key_ < other.key_; }

 private:
  uint64_t key_;
};

// How many tokens `top_tokens` needs room for.
inline int64_t top_tokens_room(int64_t k) { return 2 * k + 8 * kLanes; }

// Leaves the first `k` <= n tokens of the row at the front of `room`, in order.
template <class Row>
void top_tokens(Row row, int64_t n, int64_t k, RankedToken* room) {
  const int64_t full = top_tokens_room(k) - kLanes;
  int64_t size = 0;
  float border = -INFINITY;
  bool is_cut = false;
  const auto cut = [&] {
    std::nth_element(room, room + k - 1, room + size);
    size = k;
    border = room[k - 1].logit();
    is_cut = true;
  };
  scan_row(row, n, [&](f32x16 v, int64_t first, int) {
    // What ties with the border has a higher id than all that came before.
    uint32_t bits = is_cut ? mask_bits(v > broadcast(border)) : 0xffff;
    if (bits == 0) return;
    if (first + kLanes > n) bits &= (1u << (n - first)) - 1;
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      room[size++] = RankedToken(v[lane], first + lane);
    }
    if (size > full) cut();
  });
  if (size > k) cut();
  std::sort(room, room + k);
}

}  // namespace transfuse
