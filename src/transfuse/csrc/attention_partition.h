// The attention of an item's rows over one partition of keys, in the tiles of AMX.
//
// Of a block of sixteen rows all scores are computed, then their weights, relative to the largest in the partition,
// then the weighted values. The weights take longest, in vector registers: so between their rows the values of the
// block before and the scores of the block after are multiplied, in the tiles meanwhile.
#pragma once

#include <algorithm>

#include "attention_amx.h"
#include "attention_softmax.h"
#include "attention_workspace.h"

namespace transfuse::attention {

// Nothing for words that are not multiplied in tiles.
template <class Word>
struct Partition {
  Partition(int64_t, int64_t, int64_t, int64_t, float, float) {}
};

#if defined(__AMX_BF16__)

template <>
struct Partition<Pair> {
  // The rows of an item.
  struct Rows {
    int count;
    const Pair* query;     // [count][num_words]
    const Pair* few;       // the same as [num_words][16], if they are so few, or null
    const RowView* views;  // of the partition
    const float* slopes;   // ALiBi slopes times log2(e), or null
    int64_t position;      // of the partition's first key
  };

  Partition(int64_t key_size, int64_t num_words, int64_t value_size, int64_t stride, float scale, float softcap)
      : key_size_(key_size),
        num_words_(num_words),
        value_size_(value_size),
        stride_(stride),
        scale_(scale),
        softcap_(softcap) {}

  void lay_out(Arena& arena) {
    keys_ = arena.take<Pair>(kPartitionKeys * num_words_);
    values_ = arena.take<Pair>(kPartitionKeys / 2 * stride_);
    for (float*& scores : scores_) scores = arena.take<float>(kLanes * kScoreStride);
  }

  // Takes columns [begin, end) of the partition's tile number `tile`; the scores of a few rows are computed at once.
  void take(const Rows& rows, const TileRows<bf16>& tile_rows, int tile, Columns columns, Fetcher<bf16>& fetcher) {
    Pair* const keys = keys_ + tile * kTileKeys * num_words_;
    if (rows.few != nullptr) {
      score_few(rows.count, rows.few, num_words_, tile_rows.keys(), key_size_, columns.begin, columns.end, fetcher,
                keys, scores_[0] + tile * kTileKeys, kScoreStride);
    } else {
      pack_keys<Pair>(tile_rows.keys(), key_size_, num_words_, columns.begin, columns.end, fetcher, keys, kLanes,
                      kLanes * num_words_);
    }
    pack_values<Pair>(tile_rows.values(), value_size_, columns.begin, columns.end, fetcher,
                      values_ + tile * kTileKeys / 2 * kLanes, stride_, kLanes, kValueColumn);
    fetcher.rest();
  }

  // All rows, once the tiles that they see have been taken.
  void compute(const Rows& rows, const RowStates& states) {
    Block before, block = block_of(rows, 0, states), after;
    if (rows.few == nullptr) multiply(before, block, 0, block.num_score_parts());
    for (int row = 0; row < rows.count; row += kLanes, before = block, block = after) {
      after = row + kLanes < rows.count ? block_of(rows, row + kLanes, states) : Block{};
      // Scores of the block after lie where weights of the block before did.
      const int parts = before.num_value_parts(stride_) + after.num_score_parts();
      int done = 0;
      weigh(rows, block, [&](int m) {
        const int next = parts * (m + 1) / kLanes;
        multiply(before, after, done, next);
        done = next;
      });
      multiply(before, after, done, parts);
    }
    multiply(before, Block{}, 0, before.num_value_parts(stride_));
  }

 private:
  // Rows of scores, apart so that they do not compete for the same places in the first-level cache.
  static constexpr int64_t kScoreStride = kPartitionKeys + kLanes;
  // Words from one column of values to the next.
  static constexpr int64_t kValueColumn = kPartitionKeys / 2 * kLanes;
  // Columns of the right side that are multiplied at once.
  static constexpr int kPartColumns = 4;

  // Up to sixteen rows and the columns that some of them see; none by default.
  struct Block {
    int row = 0, num_rows = 0;
    Columns keys = {0, 0};
    const Pair* query = nullptr;
    float* scores = nullptr;  // and then weights
    RowStates states = {};

    int num_score_parts() const {
      return num_rows == 0 ? 0 : (keys.end + kPartColumns - 1) / kPartColumns - keys.begin / kPartColumns;
    }
    int num_value_parts(int64_t stride) const {
      return num_rows == 0 ? 0 : static_cast<int>((stride + kPartColumns * kLanes - 1) / (kPartColumns * kLanes));
    }
  };

  // Without rows if those see no key, whose states are then final.
  Block block_of(const Rows& rows, int row, const RowStates& all) const {
    const int num_rows = std::min(rows.count - row, kLanes);
    const Columns keys = columns_of(rows.views[row].first, rows.views[row + num_rows - 1].last, 2);
    const RowStates states = {all.largest + row, all.sum + row, all.acc + row * stride_};
    if (keys.begin < keys.end)
      return {row, num_rows, keys, rows.query + row * num_words_, scores_[row / kLanes % 2], states};
    clear(num_rows, stride_, states);
    return {};
  }

  // Of the parts of one block's values and then of another's scores those from `first` to before `last`.
  void multiply(const Block& values, const Block& scores, int first, int last) const {
    const int num_values = values.num_value_parts(stride_);
    for (int part = first; part < last; part++) {
      if (part < num_values) {
        add_values(values, part);
      } else {
        score(scores, scores.keys.begin / kPartColumns + part - num_values);
      }
    }
  }

  void score(const Block& block, int part) const {
    const int begin = std::max(block.keys.begin, part * kPartColumns);
    const int end = std::min(block.keys.end, (part + 1) * kPartColumns);
    multiply_tiles(end - begin, block.query, num_words_, keys_ + begin * kLanes * num_words_, kLanes * num_words_,
                   num_words_ / kTileUnits, block.scores + begin * kLanes, kScoreStride);
  }

  void add_values(const Block& block, int part) const {
    const int64_t column = part * kPartColumns, words = block.keys.begin * kLanes / 2;
    const int64_t tiles = (block.keys.end - block.keys.begin) / 2;
    multiply_tiles(std::min<int64_t>(stride_ / kLanes - column, kPartColumns),
                   reinterpret_cast<const Pair*>(block.scores) + words, kScoreStride,
                   values_ + column * kValueColumn + words * kLanes, kValueColumn, tiles,
                   block.states.acc + column * kLanes, stride_);
  }

  // Turns products into weights, in their places. `between` is called after each row.
  template <class F>
  void weigh(const Rows& rows, const Block& block, F&& between) const {
    const bool finishes = softcap_ != 0 || rows.slopes != nullptr || !(scale_ > 0);
    const int begin = block.keys.begin, end = block.keys.end;
    const f32x16 factor = broadcast(finishes ? 1.0f : scale_);
    for (int m = 0; m < block.num_rows; m++) {
      float* const row = block.scores + m * kScoreStride;
      if (finishes) finish(rows, block, m, row);
      mask(rows.views[block.row + m], block.keys, row);
      f32x16 even = load(row + begin * kLanes), odd = load(row + (begin + 1) * kLanes);
      for (int column = begin + 2; column < end; column += 2) {
        even = max(even, load(row + column * kLanes));
        odd = max(odd, load(row + (column + 1) * kLanes));
      }
      const float now = largest(max(even, odd)) * factor[0];
      block.states.largest[m] = now > -FLT_MAX ? now : -FLT_MAX;
    }
    for (int m = 0; m < block.num_rows; m++) {
      const float* const row = block.scores + m * kScoreStride;
      bf16* const weights = reinterpret_cast<bf16*>(block.scores + m * kScoreStride);
      const f32x16 reference = broadcast(-block.states.largest[m]);
      // In ascending order, so that columns which this block leaves out add nothing to no sum.
      f32x16 sums = {};
      for (int column = begin; column < end; column += 2) {
        const f32x16 even = weight_of<Pair>(fma(load(row + column * kLanes), factor, reference));
        const f32x16 odd = weight_of<Pair>(fma(load(row + (column + 1) * kLanes), factor, reference));
        store(weights + column * kLanes, even);
        store(weights + (column + 1) * kLanes, odd);
        sums = (sums + even) + odd;
      }
      block.states.sum[m] = sum(sums);
      between(m);
    }
  }

  // Scale, softcap and ALiBi.
  void finish(const Rows& rows, const Block& block, int m, float* row) const {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto origin = static_cast<int32_t>(rows.position - rows.views[block.row + m].position);
    for (int column = block.keys.begin; column < block.keys.end; column++) {
      f32x16 x = load(row + column * kLanes) * broadcast(scale_);
      if (softcap_ != 0) x = transfuse::tanh(x) * broadcast(softcap_);
      if (rows.slopes != nullptr) {
        const i32x16 distance = lane + (column * kLanes + origin);
        x = fma(__builtin_convertvector(distance, f32x16), broadcast(rows.slopes[block.row + m]), x);
      }
      store(row + column * kLanes, x);
    }
  }

  // Hides the keys that the row does not see.
  static void mask(const RowView& view, Columns keys, float* row) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto hide = [&](int column) {
      const i32x16 key = lane + column * kLanes;
      float* const at = row + column * kLanes;
      store(at, select((key >= view.first) & (key < view.last), load(at), broadcast(-INFINITY)));
    };
    const int seen = std::max(keys.begin, view.last / kLanes);
    for (int column = keys.begin; column < std::min(seen, (view.first + kLanes - 1) / kLanes); column++) hide(column);
    for (int column = seen; column < keys.end; column++) hide(column);
  }

  const int64_t key_size_, num_words_, value_size_, stride_;
  const float scale_, softcap_;
  Pair* keys_;    // [column][word][16]
  Pair* values_;  // [16 numbers][pair of keys][16]
  float* scores_[2];
};

#endif

}  // namespace transfuse::attention
