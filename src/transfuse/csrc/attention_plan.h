// How the attention of one step is cut into items that threads take one by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "op.h"

namespace transfuse::attention {

// Tiles and partitions of keys begin at multiples of these positions, whatever the chunk or batch.
constexpr int kTileKeys = 64;
constexpr int kPartitionKeys = 256;

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The lengths of a step.
struct Lengths {
  explicit Lengths(const Op& op);

  int64_t num_requests;
  int64_t num_kv_heads;
  int64_t group;  // query heads that share a key head
  int64_t window;
  const int32_t* starts;    // [num_requests + 1], first query row of each request
  const int32_t* seq_lens;  // [num_requests]

  int64_t num_queries(int64_t request) const { return starts[request + 1] - starts[request]; }
  // Position of a request's first query.
  int64_t context(int64_t request) const { return seq_lens[request] - num_queries(request); }
};

// Some partitions of the keys that a tile of rows sees. Rows are a request's queries times the heads of one group.
struct Item {
  int32_t request, head;
  int32_t row, num_rows;
  int64_t first_seen, last_seen;  // keys that any row of the tile sees, from first to before last
  int32_t partition, num_partitions;
  int32_t num_items;  // of this tile; the results of more than one are kept in the workspace until the last is there
  int32_t counter;    // of the tile's items that are done
  int64_t partial;    // in floats, where the workspace holds the tile's first partition

  // Keys of the item's partitions that any row sees.
  int64_t first_key() const { return std::max<int64_t>(first_seen, int64_t{partition} * kPartitionKeys); }
  int64_t last_key() const {
    return std::min<int64_t>(last_seen, int64_t{partition + num_partitions} * kPartitionKeys);
  }
  int64_t first_tile() const { return first_key() / kTileKeys * kTileKeys; }
};

// The token, counted through the step, and the query head of an item's row.
struct Place {
  int64_t token, head;
};
inline Place place_of(const Lengths& lengths, const Item& item, int64_t r) {
  const int64_t row = item.row + r;
  return {lengths.starts[item.request] + row / lengths.group, item.head * lengths.group + row % lengths.group};
}

struct Plan {
  std::vector<Item> items;
  int64_t num_partials;  // floats of workspace
  int32_t num_counters;
};

// The plan of this step, the same on every thread. Where tiles are split depends on the load and the number of threads;
// no result does. Results in the workspace have room for a multiple of `row_step` rows of `value_stride` numbers.
void make_plan(const Lengths& lengths, int64_t value_stride, int row_step, int num_threads, Plan& plan);

}  // namespace transfuse::attention
