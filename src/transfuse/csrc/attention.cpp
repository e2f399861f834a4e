// Attention of a ragged batch over the paged cache (https://arxiv.org/abs/2309.06180), prompts and single tokens alike.
//
// Tensors: 0 query [T, num_heads, D], 1 key cache [blocks, num_kv_heads, block_size, D], 2 value cache [.., Dv],
// 3 block table i32 [R, B], 4 first query row of each request i32 [R + 1], 5 lengths i32 [R], 6 sinks [num_heads]
// (optional), 7 out [T, num_heads, Dv], 8 ALiBi slopes [num_heads] (optional). Integers: 0 window. Floats: 0 scale,
// 1 softcap.
//
// A row's numbers are the same alone, in a batch, in any chunk and on any number of threads: keys are taken in tiles
// that begin at fixed positions, in ascending order, by online softmax (https://arxiv.org/abs/2205.14135); tiles are
// grouped in partitions that begin at fixed positions, each computed from scratch and merged in ascending order.
#include <algorithm>
#include <atomic>

#include "attention_cache.h"
#include "attention_narrow.h"
#include "attention_output.h"
#include "attention_partition.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_workspace.h"
#include "kernels.h"
#include "team.h"
#include "tensor_row.h"

namespace transfuse {

namespace attention {

namespace {

Workspace workspace;

// One thread's work: `T` is what the cache holds, `Word` what is multiplied.
template <class T, class Word>
class Attention {
 public:
  Attention(const Op& op, Team& team)
      : op_(op),
        team_(team),
        lengths_(op),
        cache_(op),
        key_size_(op.tensor[1].size[3]),
        value_size_(op.tensor[2].size[3]),
        num_words_(round_up((key_size_ + kWidth<Word> - 1) / kWidth<Word>, kTiled<Word> ? kLanes : 1)),
        stride_(round_up(value_size_, kValueStep)),
        output_(op, lengths_, stride_),
        scale_(op.floats[1] == 0 ? static_cast<float>(op.floats[0]) * kLog2E
                                 : static_cast<float>(op.floats[0]) / static_cast<float>(op.floats[1])),
        softcap_(static_cast<float>(op.floats[1]) * kLog2E),
        partition_(key_size_, num_words_, value_size_, stride_, scale_, softcap_) {}

  void run() {
    static thread_local Plan plan;
    make_plan(lengths_, stride_, kRowStep, team_.num_threads, plan);
    const int64_t num_rows = lengths_.starts[lengths_.num_requests];
    const int64_t num_padding = op_.tensor[7].size[0] - num_rows;
    if (!workspace.holds(plan)) {
      team_.barrier();  // until all have looked
      if (team_.thread == 0) workspace.grow(plan);
      team_.barrier();
    }
    const int64_t num_items = static_cast<int64_t>(plan.items.size());
    [[maybe_unused]] const ProductScope<Word> scope;
    team_.for_each(num_items + num_padding, [&](int64_t i) {
      if (i < num_items) {
        next_ = i + 1 < num_items ? &plan.items[i + 1] : nullptr;
        compute(plan.items[i]);
      } else {
        output_.clear(num_rows + i - num_items);
      }
    });
  }

 private:
  // Results are as wide as whole loads of values.
  static constexpr int64_t kValueStep = kLanes * kWidth<Word>;
  // Results have room for a multiple of so many rows.
  static constexpr int kRowStep = kTiled<Word> ? kLanes : 1;
  // Rows that are too few to make packing worth while, and rows of a product's block.
  static constexpr int kFewRows = kTiled<Word> ? kLanes : kNarrowRows;
  static constexpr int kMaxRows = std::max(kBlockRows, kNarrowRows);

  void take_scratch(int64_t rows) {
    lay_out(rows, nullptr);
    lay_out(rows, team_.scratch(arena_.used()));
  }

  void lay_out(int64_t rows, char* base) {
    arena_.begin(base);
    zeros_ = arena_.take<T>(std::max(key_size_, value_size_));
    query_ = arena_.take<Word>((rows + kFewRows) * num_words_ + kLanes);
    slopes_ = op_.tensor[8] ? arena_.take<float>(rows) : nullptr;
    views_ = arena_.take<RowView>(rows);
    if constexpr (kTiled<Word>) {
      partition_.lay_out(arena_);
    } else {
      keys_ = arena_.take<Word>(num_words_ * kTileKeys);
      values_ = arena_.take<Word>(kTileKeys / kWidth<Word> * stride_);
      scores_ = arena_.take<float>(kMaxRows * kTileKeys);
      weights_ = arena_.take<Word>(kMaxRows * kTileKeys / kWidth<Word>);
      lane_sums_ = arena_.take<float>(rows * kLanes);
    }
    for (RowStates* states : {&total_, &part_}) {
      states->largest = arena_.take<float>(rows);
      states->sum = arena_.take<float>(rows);
      states->acc = arena_.take<float>(round_up(rows, kRowStep) * stride_);
    }
  }

  void compute(const Item& item) {
    take_scratch(item.num_rows);
    std::memset(static_cast<void*>(zeros_), 0, std::max(key_size_, value_size_) * sizeof(T));
    cache_.find_rows(item, item.first_tile(), zeros_, *ahead_);
    if (&item != fetched_) Fetcher<T>(*ahead_, key_size_, value_size_).rest();
    pack_query(item);
    if (item.num_items > 1) return compute_some(item);
    for (int i = 0; i < item.num_partitions; i++) {
      const RowStates& states = i == 0 ? total_ : part_;
      compute_partition(item, item.partition + i, states);
      if (i > 0) merge(item.num_rows, stride_, total_, states);
    }
    output_.write(item, total_);
  }

  // One of several items of a tile: who comes last puts the partitions together.
  void compute_some(const Item& item) {
    const int64_t origin = item.first_seen / kPartitionKeys;
    for (int i = 0; i < item.num_partitions; i++) {
      const int64_t partition = item.partition + i;
      compute_partition(item, partition, partial(item, partition - origin));
    }
    std::atomic<int32_t>& done = workspace.counters[item.counter];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.num_items) return;
    done.store(0, std::memory_order_relaxed);
    clear(item.num_rows, stride_, total_);
    const int64_t num_partitions = (item.last_seen + kPartitionKeys - 1) / kPartitionKeys - origin;
    for (int64_t i = 0; i < num_partitions; i++) merge(item.num_rows, stride_, total_, partial(item, i));
    output_.write(item, total_);
  }

  RowStates partial(const Item& item, int64_t index) const {
    return states_at(workspace.partials.data() + item.partial, index, round_up(item.num_rows, kRowStep), stride_);
  }

  void pack_query(const Item& item) {
    const Tensor& query = op_.tensor[0];
    for (int r = 0; r < item.num_rows; r++) {
      const auto [token, head] = place_of(lengths_, item, r);
      const int64_t offset = token * query.stride[0] + head * query.stride[1];
      views_[r].position = lengths_.context(item.request) + token - lengths_.starts[item.request];
      if (slopes_ != nullptr) slopes_[r] = number_at(op_.tensor[8], head * op_.tensor[8].stride[0]) * kLog2E;
      Word* to = query_ + r * num_words_;
      if constexpr (kWidth<Word> == 1) {
        read_row(query, offset, key_size_, to);  // and zeros where the next row begins
      } else {
        std::fill(to + key_size_ / 2, to + num_words_, Word{});
        std::memcpy(to, query.as<bf16>() + offset, key_size_ * sizeof(bf16));
      }
    }
    if (item.num_rows <= kFewRows) {
      narrow_query_ = query_ + item.num_rows * num_words_;
      turn(query_, item.num_rows, num_words_, narrow_query_, kTiled<Word> ? kLanes : item.num_rows);
    }
  }

  void compute_partition(const Item& item, int64_t partition, const RowStates& states) {
    const int64_t begin = std::max<int64_t>(item.first_seen, partition * kPartitionKeys);
    const int64_t end = std::min<int64_t>(item.last_seen, (partition + 1) * kPartitionKeys);
    if constexpr (kTiled<Word>) {
      compute_in_tiles(item, partition * kPartitionKeys, begin, end, states);
    } else {
      clear(item.num_rows, stride_, states);
      std::memset(lane_sums_, 0, item.num_rows * kLanes * sizeof(float));
      for (int64_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
        look_ahead(item, tile);
        compute_tile(item, tile, std::max(begin, tile), std::min(end, tile + kTileKeys), states);
      }
      for (int r = 0; r < item.num_rows; r++) states.sum[r] = sum(load(lane_sums_ + r * kLanes));
    }
  }

  // Keys [begin, end) of the partition that begins at `origin`.
  void compute_in_tiles(const Item& item, int64_t origin, int64_t begin, int64_t end, const RowStates& states) {
    for (int r = 0; r < item.num_rows; r++) views_[r].look_at(origin, kPartitionKeys, lengths_.window);
    const Word* const few = item.num_rows <= kFewRows ? narrow_query_ : nullptr;
    const typename Partition<Word>::Rows rows = {item.num_rows, query_, few, views_, slopes_, origin};
    for (int64_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
      look_ahead(item, tile);
      Fetcher<T> fetcher(*ahead_, key_size_, value_size_);
      const Columns seen = columns_of(std::max(begin, tile) - tile, std::min(end, tile + kTileKeys) - tile, 2);
      partition_.take(rows, *rows_, static_cast<int>(tile - origin) / kTileKeys, seen, fetcher);
    }
    partition_.compute(rows, states);
  }

  // Turns to this tile and finds the one to fetch while it is at work: the item's next, or the first of the item that
  // probably comes next.
  void look_ahead(const Item& item, int64_t tile) {
    std::swap(rows_, ahead_);
    if (tile + kTileKeys < item.last_key()) {
      cache_.find_rows(item, tile + kTileKeys, zeros_, *ahead_);
    } else if (next_ != nullptr) {
      cache_.find_rows(*next_, next_->first_tile(), zeros_, *ahead_);
      fetched_ = next_;
    } else {
      *ahead_ = *rows_;
    }
  }

  // Columns of keys that lie in [begin, end), counted from the tile's first.
  void compute_tile(const Item& item, int64_t tile, int64_t begin, int64_t end, const RowStates& states) {
    for (int r = 0; r < item.num_rows; r++) views_[r].look_at(tile, kTileKeys, lengths_.window);
    Fetcher<T> fetcher(*ahead_, key_size_, value_size_);
    if (item.num_rows <= kNarrowRows) {
      compute_narrow(item.num_rows, tile, fetcher, states);
      fetcher.rest();
      return;
    }
    const Columns seen = columns_of(begin - tile, end - tile, 1);
    pack_keys<Word>(rows_->keys(), key_size_, num_words_, seen.begin, seen.end, fetcher, keys_, kTileKeys, kLanes);
    pack_values<Word>(rows_->values(), value_size_, seen.begin, seen.end, fetcher, values_, stride_, stride_, kLanes);
    fetcher.rest();
    const int num_blocks = (item.num_rows + kBlockRows - 1) / kBlockRows;
    for (int block = 0; block < num_blocks; block++) {
      const int row = item.num_rows * block / num_blocks;
      compute_block(row, item.num_rows * (block + 1) / num_blocks - row, tile, states);
    }
  }

  // The columns of keys that some of the rows see, which are in ascending order of position.
  Columns seen_by(int row, int num_rows) const {
    return columns_of(views_[row].first, views_[row + num_rows - 1].last, 1);
  }

  void weigh(int row, int num_rows, Columns keys, int64_t tile, const RowStates& states, float* alpha) {
    const RowView &oldest = views_[row], &newest = views_[row + num_rows - 1];
    const bool masked = newest.first > keys.begin * kLanes || oldest.last < keys.end * kLanes;
    const float* const slopes = slopes_ == nullptr ? nullptr : slopes_ + row;
    softmax(Block{num_rows, keys.begin, keys.end, masked, tile, views_ + row, slopes, scores_, states.largest + row,
                  lane_sums_ + row * kLanes, alpha},
            softcap_, weights_);
  }

  void compute_block(int row, int num_rows, int64_t tile, const RowStates& states) {
    const Columns keys = seen_by(row, num_rows);
    if (keys.begin >= keys.end) return;
    float alpha[kBlockRows];
    score(num_rows, query_ + row * num_words_, num_words_, keys_, keys.begin, keys.end, scale_, scores_);
    weigh(row, num_rows, keys, tile, states, alpha);
    add_values(num_rows, weights_, values_, stride_, keys.begin, keys.end, alpha, states.acc + row * stride_);
  }

  // Rows that are too few to make packing worth while.
  void compute_narrow(int num_rows, int64_t tile, Fetcher<T>& fetcher, const RowStates& states) {
    const Columns keys = seen_by(0, num_rows);
    float alpha[kNarrowRows];
    score_narrow(num_rows, narrow_query_, rows_->keys(), key_size_, keys.begin, keys.end, scale_, fetcher, scores_);
    fetcher.at_softmax();
    weigh(0, num_rows, keys, tile, states, alpha);
    add_values_narrow(num_rows, weights_, rows_->values(), value_size_, stride_, keys.begin, keys.end, alpha, fetcher,
                      states.acc);
  }

  const Op& op_;
  Team& team_;
  const Lengths lengths_;
  const CacheRows<T> cache_;
  const int64_t key_size_, value_size_;
  const int64_t num_words_;  // in a key
  const int64_t stride_;     // of values and results
  const Output output_;
  // In units of ln 2, so that weights are powers of two.
  const float scale_, softcap_;

  Arena arena_;
  Partition<Word> partition_;
  TileRows<T> tiles_[2];
  TileRows<T> *rows_ = &tiles_[0], *ahead_ = &tiles_[1];
  T* zeros_;
  Word *query_, *narrow_query_, *keys_, *values_, *weights_;
  float *scores_, *slopes_, *lane_sums_;
  RowView* views_;
  RowStates total_, part_;
  const Item *next_ = nullptr, *fetched_ = nullptr;
};

}  // namespace

}  // namespace attention

void paged_attention(const Op& op, Team& team) {
  using attention::Attention;
  if (op.tensor[1].dtype == kFloat32) return Attention<float, float>(op, team).run();
#if defined(__AVX512BF16__)
  if (op.tensor[0].dtype == kBFloat16) return Attention<bf16, attention::Pair>(op, team).run();
#endif
  Attention<bf16, float>(op, team).run();
}

}  // namespace transfuse
