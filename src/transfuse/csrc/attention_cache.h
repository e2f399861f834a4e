// Where a tile's keys and values lie in the paged cache, and how they are fetched ahead of their use.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "vec.h"

namespace transfuse::attention {

constexpr int kTileColumns = kTileKeys / kLanes;

// The cache that rows are fetched into, as `__builtin_prefetch` counts: the first level, or the second where products
// take so little time that more is asked for at once than can be on its way to the first.
#if defined(__AMX_BF16__)
constexpr int kFetchInto = 2;
#else
constexpr int kFetchInto = 3;
#endif

// Where the keys and then the values of a tile lie.
template <class T>
struct TileRows {
  const T* row[2 * kTileKeys];

  const T* const* keys() const { return row; }
  const T* const* values() const { return row + kTileKeys; }
};

// Fetches the rows of the tile that comes next, a few at a time between other work: what is in flight at once is
// limited, and beyond that even a request to fetch waits. Line by line as they lie in memory, which the machine's own
// prefetching recognises.
template <class T>
class Fetcher {
 public:
  Fetcher(const TileRows<T>& rows, int64_t key_size, int64_t value_size)
      : rows_(rows), key_size_(key_size), value_size_(value_size) {
    const int64_t key_steps = kTileColumns * ((key_size * sizeof(T) + 63) / 64);
    rows_per_key_step_ = static_cast<int>((kRowsAtKeys + key_steps - 1) / key_steps);
  }

  // Called for each 64 bytes of sixteen keys, before the softmax, and for each pair of values.
  TF_INLINE void at_keys() { fetch(rows_per_key_step_); }
  TF_INLINE void at_softmax() { fetch(kRowsAtSoftmax); }
  TF_INLINE void at_values() { fetch(1); }
  void rest() { fetch(2 * kTileKeys); }

 private:
  TF_INLINE void fetch(int count) {
    for (const int end = std::min(next_ + count, 2 * kTileKeys); next_ < end; next_++) {
      const T* row = rows_.row[next_];
      const int64_t size = next_ < kTileKeys ? key_size_ : value_size_;
      for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(row + i, 0, kFetchInto);
    }
  }

  // As the times that the three take for a few rows of queries.
  static constexpr int kRowsAtKeys = 72, kRowsAtSoftmax = 24;

  const TileRows<T>& rows_;
  const int64_t key_size_, value_size_;
  int rows_per_key_step_;
  int next_ = 0;
};

template <class T>
class CacheRows {
 public:
  explicit CacheRows(const Op& op) : op_(op) {}

  // Where the keys and values of a tile lie; `zeros` for those that none of the item's rows sees, which may never
  // have been written.
  void find_rows(const Item& item, int64_t tile, const T* zeros, TileRows<T>& rows) const {
    const Tensor &keys = op_.tensor[1], &values = op_.tensor[2], &table = op_.tensor[3];
    const int64_t block_size = keys.size[2];
    const int32_t* blocks = table.as<int32_t>() + item.request * table.stride[0];
    const int64_t first = std::max(tile, item.first_key()), last = std::min(tile + kTileKeys, item.last_key());
    if (last - first < kTileKeys) std::fill(rows.row, rows.row + 2 * kTileKeys, zeros);
    for (int64_t position = first; position < last;) {
      const int64_t block = blocks[position / block_size * table.stride[1]];
      const T* key = keys.as<T>() + block * keys.stride[0] + item.head * keys.stride[1];
      const T* value = values.as<T>() + block * values.stride[0] + item.head * values.stride[1];
      int64_t offset = position % block_size;
      for (; offset < block_size && position < last; offset++, position++) {
        rows.row[position - tile] = key + offset * keys.stride[2];
        rows.row[kTileKeys + position - tile] = value + offset * values.stride[2];
      }
    }
  }

 private:
  const Op& op_;
};

}  // namespace transfuse::attention
