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
  static constexpr int kParts = 8;
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

// Of vectors as the machine has them; compilers cut longer ones into single numbers.
#if defined(__AVX512BW__)
constexpr int kEncoderBytes = 64;
#elif defined(__AVX2__)
constexpr int kEncoderBytes = 32;
#else
constexpr int kEncoderBytes = 16;
#endif

class ShortEncoder {
 public:
  explicit ShortEncoder(const uint8_t* exponents) { std::copy(exponents, exponents + kNumCodes, exponents_); }

  // Codes four rows of units, the first of them `row` in its run.
  void operator()(const uint32_t* units, int64_t row, uint8_t* group, std::vector<uint32_t>& exceptions) const {
    bool known = true;
    for (int first = 0; first < kRowBytes; first += kEncoderBytes)
      known &= encode(reinterpret_cast<const char*>(units) + first, group + first);
    if (!known) except(units, row, exceptions);
  }

 private:
  typedef uint16_t Weights __attribute__((vector_size(kEncoderBytes)));
  typedef uint32_t Units __attribute__((vector_size(kEncoderBytes)));
  static constexpr int kRowBytes = 4 * kBlockRows;

  // Some columns of the rows; returns whether all their exponents have codes.
  bool encode(const char* from, uint8_t* group) const {
    Weights codes = {}, unknown = {};
    Units rest[kGroupUnits];
    for (int r = 0; r < kGroupUnits; r++) {
      Weights weights, code = {};
      std::memcpy(&weights, from + r * kRowBytes, sizeof weights);
      const Weights exponents = weights >> 7 & 0xff;
      for (int c = 1; c < kNumCodes; c++)
        code |= (Weights)(exponents == exponents_[c]) & static_cast<uint16_t>(c);
      codes |= code << r * 4;
      unknown |= (Weights)(code == 0) & exponents;
      rest[r] = (Units)weights & kSignMantissa;
    }
    for (int pair = 0; pair < 2; pair++) {
      const Units second = rest[pair * 2 + 1], both = rest[pair * 2] | second >> 8 | second << 24;
      std::memcpy(group + pair * kRowBytes, &both, sizeof both);
    }
    std::memcpy(group + 2 * kRowBytes, &codes, sizeof codes);
    uint64_t part[kEncoderBytes / 8], all = 0;
    std::memcpy(part, &unknown, sizeof unknown);
    for (const uint64_t p : part) all |= p;
    return all == 0;
  }

  void except(const uint32_t* units, int64_t row, std::vector<uint32_t>& exceptions) const {
    for (int i = 0; i < kGroupUnits * kUnitWeights; i++) {
      const uint32_t weight = units[i / 2] >> (i % 2 * 16) & 0xffff;
      // Exponent 0 is the first.
      if (std::find(exponents_, exponents_ + kNumCodes, exponent_of(weight)) == exponents_ + kNumCodes)
        exceptions.push_back(static_cast<uint32_t>(row * kUnitWeights + i) | weight << 16);
    }
  }

  uint16_t exponents_[kNumCodes];
};

}  // namespace transfuse
