// Puts the weights of linear layers into the order in which products read them, and back.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <vector>

#include "packed.h"
#include "short_bf16.h"
#include "short_pack.h"
#include "vec.h"

// As in executor.cpp: torch's OpenMP library, called by name.
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned num_threads, unsigned flags);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

namespace transfuse {

namespace {

// `k` values at `depth` values a unit; the last unit may be half empty.
template <class F>
void for_each_unit(int64_t k, int64_t depth, F&& f) {
  const int64_t full = k / depth;
  for (int64_t unit = 0; unit < full; unit++) f(unit, size_t{4});
  if (full * depth < k) f(full, size_t{2});
}

// Calls f(first, last) for parts of n things, one for each thread.
template <class F>
void for_each_part(int64_t n, int32_t num_threads, F f) {
  struct Work {
    int64_t n;
    F f;
  } work = {n, f};
  const auto run = [](void* data) {
    const Work& all = *static_cast<Work*>(data);
    const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
    all.f(all.n * thread / count, all.n * (thread + 1) / count);
  };
  GOMP_parallel(run, &work, num_threads, 0);
}

// A weight [n, k], rows `row_stride` elements apart.
struct Matrix {
  char* data;
  int64_t row_stride, n, k;
  int32_t dtype, glu_layout;

  int64_t units() const { return num_units(k, dtype); }
  int64_t blocks() const { return num_blocks(n, glu_layout != kNoGlu); }
  char* row(int64_t i) const { return data + i * row_stride * static_cast<int64_t>(item_size(dtype)); }
};

void pack_block(const Matrix& matrix, int64_t block, char* to) {
  for (int64_t lane = 0; lane < kBlockRows; lane++) {
    const int64_t row = source_row(block, lane, matrix.n, matrix.glu_layout);
    const char* const from = matrix.row(std::max<int64_t>(row, 0));
    for_each_unit(matrix.k, unit_depth(matrix.dtype), [&](int64_t unit, size_t bytes) {
      uint32_t value = 0;
      if (row >= 0) std::memcpy(&value, from + unit * 4, bytes);
      std::memcpy(to + (unit * kBlockRows + lane) * 4, &value, 4);
    });
    for (int64_t unit = ceil_div(matrix.k, unit_depth(matrix.dtype)); unit < matrix.units(); unit++)
      std::memset(to + (unit * kBlockRows + lane) * 4, 0, 4);
  }
}

void unpack_block(const char* from, int64_t block, const Matrix& matrix) {
  for (int64_t lane = 0; lane < kBlockRows; lane++) {
    const int64_t row = source_row(block, lane, matrix.n, matrix.glu_layout);
    if (row < 0) continue;
    char* const to = matrix.row(row);
    for_each_unit(matrix.k, unit_depth(matrix.dtype), [&](int64_t unit, size_t bytes) {
      std::memcpy(to + unit * 4, from + (unit * kBlockRows + lane) * 4, bytes);
    });
  }
}

// Writes the groups of a block, and of each of its runs the exceptions.
void encode_block(const uint32_t* units, const ShortLayout& layout, const ShortEncoder& encode, uint8_t* groups,
                  std::vector<uint32_t>* exceptions) {
  for (int64_t group = 0; group < layout.groups; group++) {
    encode(units + group * kGroupUnits * kBlockRows, group % kRunGroups * kGroupUnits, groups + group * kGroupBytes,
           exceptions[group / kRunGroups]);
  }
}

}  // namespace

}  // namespace transfuse

using namespace transfuse;

#define TF_EXPORT extern "C" __attribute__((visibility("default")))

// Bytes of the packed weight of a linear layer with W [n, k].
TF_EXPORT int64_t transfuse_packed_bytes(int64_t n, int64_t k, int32_t dtype, int32_t glu) {
  return num_blocks(n, glu != 0) * num_units(k, dtype) * kBlockRows * 4;
}

// Packs W [n, k], rows `row_stride` elements apart, into `out`, all bytes of which are written.
TF_EXPORT void transfuse_pack_linear(void* weight, int64_t row_stride, int64_t n, int64_t k, int32_t dtype,
                                     int32_t glu_layout, void* out, int32_t num_threads) {
  const Matrix matrix = {static_cast<char*>(weight), row_stride, n, k, dtype, glu_layout};
  const int64_t block_bytes = matrix.units() * kBlockRows * 4;
  for_each_part(matrix.blocks(), num_threads, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++)
      pack_block(matrix, block, static_cast<char*>(out) + block * block_bytes);
  });
}

// Whether kernels of this build read coded exponents quicker than whole weights.
TF_EXPORT int32_t transfuse_decodes_quickly() { return kDecodesQuickly; }

// Chooses the exponents that get codes in a bfloat16 W [n, k]; returns how many weights have another.
TF_EXPORT int64_t transfuse_choose_exponents(void* weight, int64_t row_stride, int64_t n, int64_t k, uint8_t* exponents,
                                             int32_t num_threads) {
  const Matrix matrix = {static_cast<char*>(weight), row_stride, n, k, kBFloat16, kNoGlu};
  std::array<int64_t, 256> all = {};
  std::mutex mutex;
  for_each_part(n, num_threads, [&](int64_t first, int64_t last) {
    ExponentCounts counts;
    for (int64_t row = first; row < last; row++) counts.add(reinterpret_cast<const uint16_t*>(matrix.row(row)), k);
    const std::lock_guard<std::mutex> guard(mutex);
    for (int exponent = 0; exponent < 256; exponent++) all[exponent] += counts[exponent];
  });
  return choose_exponents(all, exponents);
}

// Bytes of the same weight in bfloat16 once its exponents are coded, when so many of its weights have other ones.
TF_EXPORT int64_t transfuse_short_bytes(int64_t n, int64_t k, int32_t glu, int64_t exceptions) {
  return ShortLayout(num_blocks(n, glu != 0), num_units(k, kBFloat16)).bytes(exceptions);
}

// Packs a bfloat16 W and codes its exponents, with those that were chosen for it.
TF_EXPORT void transfuse_pack_short(void* weight, int64_t row_stride, int64_t n, int64_t k, int32_t glu_layout,
                                    const uint8_t* exponents, void* out, int32_t num_threads) {
  const Matrix matrix = {static_cast<char*>(weight), row_stride, n, k, kBFloat16, glu_layout};
  const ShortLayout layout(matrix.blocks(), matrix.units());
  const ShortEncoder encode(exponents);
  char* const to = static_cast<char*>(out);
  std::vector<std::vector<uint32_t>> exceptions(matrix.blocks() * layout.runs);
  for_each_part(matrix.blocks(), num_threads, [&](int64_t first, int64_t last) {
    std::vector<uint32_t> packed(layout.groups * kGroupUnits * kBlockRows);
    for (int64_t block = first; block < last; block++) {
      pack_block(matrix, block, reinterpret_cast<char*>(packed.data()));
      uint8_t* const groups = reinterpret_cast<uint8_t*>(to) + layout.first_group + block * layout.groups * kGroupBytes;
      encode_block(packed.data(), layout, encode, groups, exceptions.data() + block * layout.runs);
    }
  });

  std::memset(to, 0, layout.first_group);
  std::memcpy(to, exponents, kNumCodes);
  uint32_t count = 0;
  for (size_t run = 0; run < exceptions.size(); run++) {
    std::memcpy(to + ShortLayout::kStarts + run * 4, &count, 4);
    for (const uint32_t exception : exceptions[run])
      std::memcpy(to + layout.first_exception + int64_t{count++} * 4, &exception, 4);
  }
  std::memcpy(to + ShortLayout::kStarts + exceptions.size() * 4, &count, 4);
  const int64_t end = layout.first_exception + int64_t{count} * 4;
  std::memset(to + end, 0, layout.bytes(count) - end);
}

// The inverse of both: writes W [n, k], rows `row_stride` elements apart.
TF_EXPORT void transfuse_unpack_linear(const void* packed, int64_t n, int64_t k, int32_t dtype, int32_t glu_layout,
                                       int32_t encoding, void* weight, int64_t row_stride, int32_t num_threads) {
  const Matrix matrix = {static_cast<char*>(weight), row_stride, n, k, dtype, glu_layout};
  const int64_t block_bytes = matrix.units() * kBlockRows * 4;
  for_each_part(matrix.blocks(), num_threads, [&](int64_t first, int64_t last) {
    if (encoding == kPlain) {
      for (int64_t block = first; block < last; block++)
        unpack_block(static_cast<const char*>(packed) + block * block_bytes, block, matrix);
      return;
    }
    const ShortBf16 coded(packed, matrix.blocks(), matrix.units());
    std::vector<uint32_t> decoded(coded.decoded_units() * kBlockRows);
    for (int64_t block = first; block < last; block++) {
      coded.decode_block(block, decoded.data());
      unpack_block(reinterpret_cast<const char*>(decoded.data()), block, matrix);
    }
  });
}
