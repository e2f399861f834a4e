// A row's distribution in the order of likelihood, without sorting all of it: tokens are sorted into bins by how far
// their logits lie below the highest, and only the bins that a border falls into are put in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "top_tokens.h"

namespace transfuse {

struct Place {
  int64_t index;
  double mass;  // of all tokens up to this one
};

// In what follows, `before` is the mass of tokens that come ahead of those with these weights.

// The first place at which the mass reaches `limit`, or the last.
inline Place place_reaching(const float* weight, int64_t n, double before, double limit) {
  double mass = before;
  int64_t i = 0;
  do mass += weight[i++];
  while (i < n && mass < limit);
  return {i - 1, mass};
}

// The first place at which the mass exceeds `target`; where rounding hides it, the last that has weight of its own.
inline int64_t place_beyond(const float* weight, int64_t n, double before, double target) {
  double mass = before;
  int64_t last = 0;
  for (int64_t i = 0; i < n; i++) {
    mass += weight[i];
    if (mass > target) return i;
    if (weight[i] > 0.0f) last = i;
  }
  return last;
}

// The mass at which a draw ends: below `mass`, whatever the rounding.
inline double draw_target(double uniform, double mass) { return std::min(uniform * mass, std::nextafter(mass, 0.0)); }

// Weights of ranked tokens; writes in sixteens, so `weight` needs room for a multiple of them.
inline void weigh_tokens(const RankedToken* tokens, int64_t n, const Weighing& weigh, float* weight) {
  for (int64_t i = 0; i < n; i += kLanes) {
    f32x16 logits = broadcast(-INFINITY);
    for (int64_t j = i; j < std::min(n, i + kLanes); j++) logits[j - i] = tokens[j].logit();
    store(weight + i, weigh(logits));
  }
}

// Bins of a width that grows with the distance: 256 to each doubling, from 2^-8 to 2^16.
constexpr int64_t kBins = 256 * 24;

// Number of the bin of logits at a distance from the highest, at most `last`.
TF_INLINE i32x16 bin_of(f32x16 distance, int32_t last) {
  constexpr int32_t kFirst = (127 - 8) << 8;  // 2^-8 as a float32 without its last 15 bits
  const i32x16 bin = ((i32x16)distance >> 15) - kFirst;
  const i32x16 positive = bin > 0 ? bin : i32x16{};
  return positive < last ? positive : i32x16{} + last;
}

// A bin so far down that it and all beyond, even if they held every token, could not matter to the nucleus.
inline int32_t bin_beyond(int64_t n, const Weighing& weigh, double top_p) {
  const double distance = std::log(2.0 * static_cast<double>(n) / (1.0 - top_p)) / weigh.inverse_temperature;
  const auto bounded = static_cast<float>(std::min(distance, 1e30));
  return std::min<int32_t>(bin_of(broadcast(bounded), kBins - 1)[0] + 1, kBins - 1);
}

struct NucleusRoom {
  double* mass;         // [kBins]
  RankedToken* tokens;  // [V]
  float* weight;        // [V, rounded up to sixteens]
};

// Draws from the smallest set of most likely tokens whose share reaches `top_p`.
template <class Row>
int64_t draw_nucleus(Row row, int64_t n, const Weighing& weigh, double top_p, double uniform, const NucleusRoom& room) {
  const int32_t end_bin = bin_beyond(n, weigh, top_p);
  std::fill_n(room.mass, end_bin + 1, 0.0);
  WideSum beyond;
  scan_row(row, n, [&](f32x16 v, int64_t, int) {
    const f32x16 weight = weigh(v);
    const i32x16 bin = bin_of(weigh.max - v, end_bin);
    if (mask_bits(bin < end_bin) == 0) {
      beyond.add(weight);
      return;
    }
    for (int j = 0; j < kLanes; j++) room.mass[bin[j]] += weight[j];
  });
  room.mass[end_bin] += beyond.total();
  // From here on: of the tokens in this bin and all before it.
  for (int64_t b = 1; b <= end_bin; b++) room.mass[b] += room.mass[b - 1];

  int64_t opened = -1, size = 0;
  const auto open = [&](int64_t bin) {
    if (bin == opened) return;
    opened = bin;
    size = 0;
    scan_row(row, n, [&](f32x16 v, int64_t first, int) {
      uint32_t bits = mask_bits(bin_of(weigh.max - v, end_bin) == static_cast<int32_t>(bin));
      if (bits != 0 && first + kLanes > n) bits &= (1u << (n - first)) - 1;
      for (; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        room.tokens[size++] = RankedToken(v[lane], first + lane);
      }
    });
    std::sort(room.tokens, room.tokens + size);
    weigh_tokens(room.tokens, size, weigh, room.weight);
  };
  const auto before = [&](int64_t bin) { return bin > 0 ? room.mass[bin - 1] : 0.0; };

  const double limit = top_p * room.mass[end_bin];
  const int64_t last = std::lower_bound(room.mass, room.mass + end_bin, limit) - room.mass;
  open(last);
  const Place end = place_reaching(room.weight, size, before(last), limit);
  const double target = draw_target(uniform, end.mass);
  const int64_t drawn = std::upper_bound(room.mass, room.mass + last, target) - room.mass;
  open(drawn);
  // In the last bin the same sum led to end.mass, so that the place is not beyond.
  return room.tokens[place_beyond(room.weight, size, before(drawn), target)].id();
}

}  // namespace transfuse
