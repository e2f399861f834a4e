#include "attention_plan.h"

#include <algorithm>

namespace transfuse::attention {

namespace {

// A multiple of the rows of a product's block, large enough that packing a tile of keys is a small share of the work.
constexpr int64_t kTileRows = 288;
// Packing and fetching a tile of keys takes about as long as the products of so many rows with it.
constexpr int64_t kPackingRows = 12;
// So many items for each thread leave the last one to finish little to do alone.
constexpr int64_t kItemsPerThread = 8;

struct Keys {
  int64_t first, last;
  int64_t num_tiles() const { return (last + kTileKeys - 1) / kTileKeys - first / kTileKeys; }
};

Keys visible_keys(const Lengths& lengths, int64_t request, int64_t row, int64_t num_rows) {
  const int64_t position = lengths.context(request) + row / lengths.group;
  const int64_t last = lengths.context(request) + (row + num_rows - 1) / lengths.group + 1;
  return {lengths.window > 0 ? std::max<int64_t>(0, position - lengths.window + 1) : 0, last};
}

// Calls f(row, num_rows, keys, cost) for each tile of rows of one key head.
template <class F>
void for_each_tile(const Lengths& lengths, int64_t request, F&& f) {
  const int64_t rows = lengths.num_queries(request) * lengths.group;
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int64_t num_rows = std::min(kTileRows, rows - row);
    const Keys keys = visible_keys(lengths, request, row, num_rows);
    f(row, num_rows, keys, keys.num_tiles() * (num_rows + kPackingRows));
  }
}

}  // namespace

Lengths::Lengths(const Op& op)
    : num_requests(op.tensor[5].size[0]),
      num_kv_heads(op.tensor[1].size[1]),
      group(op.tensor[0].size[1] / op.tensor[1].size[1]),
      window(op.ints[0]),
      starts(op.tensor[4].as<int32_t>()),
      seq_lens(op.tensor[5].as<int32_t>()) {}

void make_plan(const Lengths& lengths, int64_t value_stride, int row_step, int num_threads, Plan& plan) {
  plan.items.clear();
  plan.num_partials = 0;
  plan.num_counters = 0;
  int64_t total_cost = 0;
  for (int64_t request = 0; request < lengths.num_requests; request++)
    for_each_tile(lengths, request, [&](int64_t, int64_t, Keys, int64_t cost) { total_cost += cost; });
  const int64_t fair_cost = total_cost * lengths.num_kv_heads / (num_threads * kItemsPerThread) + 1;

  // Heads outside tiles: what tiles of one head read stays in the cache.
  for (int64_t request = 0; request < lengths.num_requests; request++)
    for (int64_t head = 0; head < lengths.num_kv_heads; head++)
      for_each_tile(lengths, request, [&](int64_t row, int64_t num_rows, Keys keys, int64_t cost) {
        Item item;
        item.request = static_cast<int32_t>(request);
        item.head = static_cast<int32_t>(head);
        item.row = static_cast<int32_t>(row);
        item.num_rows = static_cast<int32_t>(num_rows);
        item.first_seen = keys.first;
        item.last_seen = keys.last;
        const int64_t first = keys.first / kPartitionKeys;
        const int64_t last = (keys.last + kPartitionKeys - 1) / kPartitionKeys;
        const int64_t wanted = num_threads == 1 ? 1 : (cost + fair_cost - 1) / fair_cost;
        item.num_items = static_cast<int32_t>(std::min(last - first, wanted));
        item.counter = plan.num_counters;
        item.partial = plan.num_partials;
        for (int64_t i = 0; i < item.num_items; i++) {
          const int64_t begin = first + (last - first) * i / item.num_items;
          const int64_t end = first + (last - first) * (i + 1) / item.num_items;
          item.partition = static_cast<int32_t>(begin);
          item.num_partitions = static_cast<int32_t>(end - begin);
          plan.items.push_back(item);
        }
        if (item.num_items > 1) {
          plan.num_counters++;
          plan.num_partials += (last - first) * round_up(num_rows, row_step) * (value_stride + 2);
        }
      });
}

}  // namespace transfuse::attention
