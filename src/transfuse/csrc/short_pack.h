// Codes packed weights as short_bf16.h describes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "short_bf16.h"

namespace transfuse {

// Of the lower sixteen bits.
TF_INLINE int exponent_of(uint32_t weight) { return weight >> 7 & 0xff; }

// How often each exponent comes.
class ExponentCounts {
 public:
  void add(const uint16_t* weights, int64_t n) {
    int64_t i = 0;
    for (; i + kParts <= n; i += kParts)
      for (int j = 0; j < kParts; j++) part_[j][exponent_of(weights[i + j])]++;
    for (; i < n; i++) part_[0][exponent_of(weights[i])]++;
  }

  int64_t operator[](int exponent) const {
    int64_t count = 0;
    for (int j = 0; j < kParts; j++) count += part_[j][exponent];
    return count;
  }

 private:
  // A count that follows one of the same exponent need not wait for it.
  static constexpr int kParts = 4;
  int64_t part_[kParts][256] = {};
};

// Writes the exponents of the codes, of which the first is 0, and returns how many weights have none of them.
inline int64_t choose_exponents(const std::array<int64_t, 256>& counts, uint8_t* exponents) {
  std::array<int, 255> by_count;
  for (int i = 0; i < 255; i++) by_count[i] = i + 1;
  std::stable_sort(by_count.begin(), by_count.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  exponents[0] = 0;
  for (int i = 0; i < kNumCodes - 1; i++) exponents[i + 1] = static_cast<uint8_t>(by_count[i]);
  int64_t rest = 0;
  for (int i = kNumCodes - 1; i < 255; i++) rest += counts[by_count[i]];
  return rest;
}

class ShortEncoder {
 public:
  explicit ShortEncoder(const uint8_t* exponents) {
    for (int code = 0; code < kNumCodes; code++) code_[exponents[code]] = static_cast<uint8_t>(code);
  }

  // Codes four rows of units, the first of them `row` in its run.
  void operator()(const uint32_t* units, int64_t row, uint8_t* group, std::vector<uint32_t>& exceptions) const {
    uint32_t codes[kBlockRows] = {};
    for (int r = 0; r < kGroupUnits; r++, units += kBlockRows) {
      bool all_known = true;
      for (int lane = 0; lane < kBlockRows; lane++) {
        const uint32_t first = code_[exponent_of(units[lane])], second = code_[exponent_of(units[lane] >> 16)];
        codes[lane] |= (first | second << 16) << (r * 4);
        all_known &= first != 0 && second != 0;
      }
      if (!all_known) except(units, row + r, exceptions);
    }
    units -= kGroupUnits * kBlockRows;
    for (int pair = 0; pair < 2; pair++, units += 2 * kBlockRows) {
      for (int lane = 0; lane < kBlockRows; lane++) {
        const uint32_t second = units[kBlockRows + lane] & kSignMantissa;
        const uint32_t both = (units[lane] & kSignMantissa) | (second >> 8 | second << 24);
        std::memcpy(group + (pair * kBlockRows + lane) * 4, &both, 4);
      }
    }
    std::memcpy(group + 128, codes, sizeof codes);
  }

 private:
  void except(const uint32_t* units, int64_t row, std::vector<uint32_t>& exceptions) const {
    for (int i = 0; i < kUnitWeights; i++) {
      const uint32_t weight = units[i / 2] >> (i % 2 * 16) & 0xffff;
      const int exponent = exponent_of(weight);
      if (exponent != 0 && code_[exponent] == 0)
        exceptions.push_back(static_cast<uint32_t>(row * kUnitWeights + i) | weight << 16);
    }
  }

  std::array<uint8_t, 256> code_ = {};
};

}  // namespace transfuse
