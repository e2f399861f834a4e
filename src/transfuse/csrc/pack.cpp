// Puts the weights of linear layers into the order in which products read them, and back.
#include <cstring>

#include "packed.h"
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

// Calls f(block) for all blocks, one range of them for each thread.
template <class F>
void for_each_block(int64_t blocks, int32_t num_threads, F f) {
  struct Work {
    int64_t blocks;
    F f;
  } work = {blocks, f};
  const auto run = [](void* data) {
    const Work& all = *static_cast<Work*>(data);
    const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
    for (int64_t i = all.blocks * thread / count; i < all.blocks * (thread + 1) / count; i++) all.f(i);
  };
  GOMP_parallel(run, &work, num_threads, 0);
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
TF_EXPORT void transfuse_pack_linear(const void* weight, int64_t row_stride, int64_t n, int64_t k, int32_t dtype,
                                     int32_t glu_layout, void* out, int32_t num_threads) {
  const int64_t units = num_units(k, dtype), item = item_size(dtype);
  for_each_block(num_blocks(n, glu_layout != kNoGlu), num_threads, [&](int64_t block) {
    char* const to = static_cast<char*>(out) + block * units * kBlockRows * 4;
    for (int64_t lane = 0; lane < kBlockRows; lane++) {
      const int64_t row = source_row(block, lane, n, glu_layout);
      const char* const from = static_cast<const char*>(weight) + (row < 0 ? 0 : row) * row_stride * item;
      for_each_unit(k, unit_depth(dtype), [&](int64_t unit, size_t bytes) {
        uint32_t value = 0;
        if (row >= 0) std::memcpy(&value, from + unit * 4, bytes);
        std::memcpy(to + (unit * kBlockRows + lane) * 4, &value, 4);
      });
      for (int64_t unit = ceil_div(k, unit_depth(dtype)); unit < units; unit++)
        std::memset(to + (unit * kBlockRows + lane) * 4, 0, 4);
    }
  });
}

// The inverse: writes W [n, k], rows `row_stride` elements apart.
TF_EXPORT void transfuse_unpack_linear(const void* packed, int64_t n, int64_t k, int32_t dtype, int32_t glu_layout,
                                       void* weight, int64_t row_stride, int32_t num_threads) {
  const int64_t units = num_units(k, dtype), item = item_size(dtype);
  for_each_block(num_blocks(n, glu_layout != kNoGlu), num_threads, [&](int64_t block) {
    const char* const from = static_cast<const char*>(packed) + block * units * kBlockRows * 4;
    for (int64_t lane = 0; lane < kBlockRows; lane++) {
      const int64_t row = source_row(block, lane, n, glu_layout);
      if (row < 0) continue;
      char* const to = static_cast<char*>(weight) + row * row_stride * item;
      for_each_unit(k, unit_depth(dtype), [&](int64_t unit, size_t bytes) {
        std::memcpy(to + unit * 4, from + (unit * kBlockRows + lane) * 4, bytes);
      });
    }
  });
}
