// A packed weight of bfloat16 in twelve bits each, none of which is lost.
//
// Nearly all exponents of a trained weight are among fifteen. A weight is kept as a byte of its sign and mantissa, and
// four bits that say which of these its exponent is. Code 0 is exponent 0, so that zeros need nothing else, and stands
// for all other exponents too: weights that have one, one in ten thousand, are listed, and put in their places when the
// others have been decoded. (DFloat11, arXiv 2504.11651, gives exponents Huffman codes; codes of one width decode by
// looking up many at a time.)
//
// In memory: the exponents of the codes u8 [16], `starts` u32 [blocks * runs + 1], groups [blocks, groups], exceptions u32;
// each at a multiple of 64. A group is four rows of units, 128 weights: signs and mantissas of the first two, u32 [16];
// those of the others; and codes u16 [32], four bits for each row, the first lowest. Of a pair of rows, signs and
// mantissas of the first are where they are in the weights, and those of the second where the exponents of the first
// would be, rotated by eight bits. A run is up to kRunUnits rows of units of a block; its exceptions are starts[run] to
// starts[run + 1], each with its position in the run and, above, its bits.
#pragma once

#include <algorithm>
#include <cstring>

#include "packed.h"
#include "vec.h"

namespace transfuse {

constexpr int64_t kGroupUnits = 4, kGroupBytes = 192;
// A run takes less time to decode and multiply than the processor looks ahead: so memory is read without pause.
constexpr int64_t kRunUnits = 16, kRunGroups = kRunUnits / kGroupUnits;
// Runs that are on their way from memory: some six kilobytes.
constexpr int64_t kRunsAhead = 8;
constexpr int kNumCodes = 16;
// Weights in a row of units.
constexpr int64_t kUnitWeights = 2 * kBlockRows;

// Sign and mantissa of the two weights of a unit.
constexpr uint32_t kSignMantissa = 0x807f807f;

struct ShortLayout {
  ShortLayout(int64_t blocks, int64_t units)
      : groups(ceil_div(units, kGroupUnits)),
        runs(ceil_div(groups, kRunGroups)),
        first_group(kStarts + ceil_div((blocks * runs + 1) * 4, 64) * 64),
        first_exception(first_group + blocks * groups * kGroupBytes) {}

  int64_t bytes(int64_t exceptions) const { return first_exception + ceil_div(exceptions * 4, 64) * 64; }

  static constexpr int64_t kStarts = 64;
  int64_t groups, runs;  // of a block
  int64_t first_group, first_exception;
};

// Whether decoding takes less time than reading the bytes that it saves.
#if defined(__AVX2__)
constexpr bool kDecodesQuickly = true;
#else
constexpr bool kDecodesQuickly = false;
#endif

#if defined(__AVX512BW__)

class GroupDecoder {
 public:
  explicit GroupDecoder(const uint8_t* exponents) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents)));
    // Twice the sixteen: so the looking up ignores what is above a code.
    table_ = _mm512_maskz_broadcast_i64x4(0xff, _mm256_slli_epi16(words, 7));
  }

  TF_INLINE void operator()(const uint8_t* group, uint32_t* out) const {
    const __m512i first = _mm512_loadu_si512(group), second = _mm512_loadu_si512(group + 64);
    const __m512i codes = _mm512_loadu_si512(group + 128);
    put(out, first, codes);
    put(out + kBlockRows, rotated(first), _mm512_srli_epi16(codes, 4));
    put(out + 2 * kBlockRows, second, _mm512_srli_epi16(codes, 8));
    put(out + 3 * kBlockRows, rotated(second), _mm512_srli_epi16(codes, 12));
  }

 private:
  // Unmasked, gcc 12 warns of its own header.
  static TF_INLINE __m512i rotated(__m512i units) { return _mm512_maskz_rol_epi32(0xffff, units, 8); }

  TF_INLINE void put(uint32_t* out, __m512i units, __m512i codes) const {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i exponents = _mm512_permutexvar_epi16(codes, table_);
    _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(units, _mm512_set1_epi32(static_cast<int>(kSignMantissa)),
                                                       exponents, kAndOr));
  }

  __m512i table_;
};

#elif defined(__AVX2__)

class GroupDecoder {
 public:
  explicit GroupDecoder(const uint8_t* exponents)
      : table_(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents)))) {}

  TF_INLINE void operator()(const uint8_t* group, uint32_t* out) const {
    const __m256i rotate = _mm256_set_epi8(14, 13, 12, 15, 10, 9, 8, 11, 6, 5, 4, 7, 2, 1, 0, 3,  //
                                           14, 13, 12, 15, 10, 9, 8, 11, 6, 5, 4, 7, 2, 1, 0, 3);
    const __m256i low = _mm256_set1_epi16(15);
    for (int half = 0; half < 2; half++, group += 32, out += kBlockRows / 2) {
      const __m256i first = load(group), second = load(group + 64), codes = load(group + 128);
      put(out, first, _mm256_and_si256(codes, low));
      put(out + kBlockRows, _mm256_shuffle_epi8(first, rotate), _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
      put(out + 2 * kBlockRows, second, _mm256_and_si256(_mm256_srli_epi16(codes, 8), low));
      put(out + 3 * kBlockRows, _mm256_shuffle_epi8(second, rotate), _mm256_srli_epi16(codes, 12));
    }
  }

 private:
  static TF_INLINE __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

  // Bytes above codes are zeros, and so is the exponent of code 0.
  TF_INLINE void put(uint32_t* out, __m256i units, __m256i codes) const {
    const __m256i exponents = _mm256_slli_epi16(_mm256_shuffle_epi8(table_, codes), 7);
    const __m256i others = _mm256_and_si256(units, _mm256_set1_epi32(static_cast<int>(kSignMantissa)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_or_si256(others, exponents));
  }

  const __m256i table_;
};

#else

class GroupDecoder {
 public:
  explicit GroupDecoder(const uint8_t* exponents) {
    for (int code = 0; code < kNumCodes; code++) table_[code] = static_cast<uint32_t>(exponents[code]) << 7;
  }

  void operator()(const uint8_t* group, uint32_t* out) const {
    for (int lane = 0; lane < kBlockRows; lane++) {
      uint32_t units[2], codes;
      for (int pair = 0; pair < 2; pair++) std::memcpy(&units[pair], group + pair * 64 + lane * 4, 4);
      std::memcpy(&codes, group + 128 + lane * 4, 4);
      for (int row = 0; row < kGroupUnits; row++, codes >>= 4) {
        const uint32_t unit = units[row / 2], turned = row % 2 == 0 ? unit : unit << 8 | unit >> 24;
        out[row * kBlockRows + lane] = (turned & kSignMantissa) | table_[codes & 15] | table_[codes >> 16 & 15] << 16;
      }
    }
  }

 private:
  uint32_t table_[kNumCodes];
};

#endif

// A weight in memory as described above.
class ShortBf16 {
 public:
  ShortBf16(const void* data, int64_t blocks, int64_t units)
      : layout_(blocks, units), data_(static_cast<const uint8_t*>(data)) {}

  int64_t runs() const { return layout_.runs; }
  // Rows of units that decoding a whole block writes.
  int64_t decoded_units() const { return layout_.groups * kGroupUnits; }

  // Writes a run of a block as rows of units, in whole groups. Of `at_once` blocks that are decoded together, run by run,
  // what comes some runs later is fetched meanwhile.
  TF_INLINE void decode(int64_t block, int64_t run, int64_t at_once, uint32_t* out) const {
    const uint8_t* ahead = group_ahead(block, run, at_once);
    const GroupDecoder decoder(data_);
    const uint8_t* group = group_at(block, run);
    const int64_t count = std::min(kRunGroups, layout_.groups - run * kRunGroups);
    uint32_t* to = out;
    for (int64_t i = 0; i < count; i++, group += kGroupBytes, ahead += kGroupBytes, to += kGroupUnits * kBlockRows) {
      for (int line = 0; line < kGroupBytes; line += 64) __builtin_prefetch(ahead + line);
      decoder(group, to);
    }
    uint32_t first, last;
    const uint8_t* const start = data_ + ShortLayout::kStarts + (block * layout_.runs + run) * 4;
    std::memcpy(&first, start, 4);
    std::memcpy(&last, start + 4, 4);
    for (const uint8_t* p = exception_at(first); p < exception_at(last); p += 4) {
      uint16_t position, bits;
      std::memcpy(&position, p, 2);
      std::memcpy(&bits, p + 2, 2);
      std::memcpy(reinterpret_cast<char*>(out) + position * 2, &bits, 2);
    }
  }

  // Writes a whole block.
  void decode_block(int64_t block, uint32_t* out) const {
    for (int64_t run = 0; run < layout_.runs; run++) decode(block, run, 1, out + run * kRunUnits * kBlockRows);
  }

 private:
  const uint8_t* group_at(int64_t block, int64_t run) const {
    return data_ + layout_.first_group + (block * layout_.groups + run * kRunGroups) * kGroupBytes;
  }

  const uint8_t* group_ahead(int64_t block, int64_t run, int64_t at_once) const {
    const int64_t then = run + ceil_div(kRunsAhead, at_once);
    return then < layout_.runs ? group_at(block, then) : group_at(block + at_once, then - layout_.runs);
  }

  const uint8_t* exception_at(uint32_t i) const { return data_ + layout_.first_exception + int64_t{i} * 4; }

  const ShortLayout layout_;
  const uint8_t* const data_;
};

// Where runs of a block and of those after it are written.
struct DecodedRuns {
  uint32_t* data;
  int64_t block_units, run_units;  // from one to the next

  uint32_t* at(int64_t block, int64_t run) const {
    return data + (block * block_units + run * run_units) * kBlockRows;
  }
};

}  // namespace transfuse
