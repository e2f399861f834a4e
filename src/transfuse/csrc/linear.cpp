// A linear layer with what comes before and after it: out = residual + act(norm(x + addend) W^T + bias).
//
// tensors: 0 x [M, K], 1 packed weight, 2 bias [N] opt, 3 residual [M, Nout] opt, 4 out [M, Nout],
//   5 norm weight [K] opt, 6 norm bias [K] opt, 7 addend [M, K] opt, 8 sum_out [M, K] opt, 9 normed [M, K] workspace
//   opt. float32 or bfloat16 each, rows of any stride; `normed` has the type of the weight. `out` may be `residual`;
//   `sum_out` overlaps no input.
// ints: 0 N, the rows of W, 1 K, 2 activation, 3 glu layout (then Nout = N / 2), 4 norm kind, 5 type of the weight,
//   6 encoding of the weight.
// floats: 0 eps, 1 norm offset, 2 glu limit (infinite: none), 3 glu offset.
//
// With glu: act(min(gate, limit)) * (clamp(up, -limit, limit) + glu offset). `sum_out` gets x + addend, rounded; the
// norm is of the rounded sum. The product's left side has the weight's type, its sums are float32.
#include <algorithm>

#include "kernels.h"
#include "linear_epilogue.h"
#include "linear_prologue.h"
#include "products.h"
#include "short_bf16.h"
#include "team.h"

namespace transfuse {

namespace {

// Up to so many values, each thread norms all rows for itself: that is quicker than waiting for one another.
constexpr int64_t kOwnNormValues = 8192;
// Weights of an item when they come from memory: long enough to stream, short enough to share out evenly.
constexpr int64_t kItemBytes = 48 << 10;
// Of smaller products, so that whoever comes late finds others to have done its part.
constexpr int64_t kItemsPerThread = 8;
// Blocks of an item where registers have room for them: fewer accumulators would wait for one another.
constexpr int64_t kItemBlocks = 4;
// Blocks that are decoded together, run by run.
constexpr int64_t kCodedBlocks = 4;

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Part i of n things cut into `parts` nearly equal parts begins here.
constexpr int64_t part_begin(int64_t n, int64_t parts, int64_t i) { return n * i / parts; }

// The left side of the product as rows in memory.
struct Rows {
  const char* data;
  int64_t row_bytes;
};

template <class W>
class Linear {
  using P = Products<W>;

 public:
  Linear(const Op& op, Team& team)
      : op_(op),
        team_(team),
        m_(op.tensor[4].size[0]),
        k_(op.ints[1]),
        glu_(op.ints[3] != kNoGlu),
        units_(num_units(k_, op.ints[5])),
        blocks_(num_blocks(op.ints[0], glu_)),
        weight_(op.tensor[1].as<uint32_t>()),
        coded_(op.tensor[1].data, blocks_, units_),
        is_coded_(op.ints[6] == kShortBf16),
        products_(m_),
        epilogue_(op.tensor[2], op.tensor[3], op.tensor[4], op.ints[0], op.ints[2], op.ints[3],
                  static_cast<float>(op.floats[2]), static_cast<float>(op.floats[3])) {}

  void run() {
    if (m_ == 0) return;
    plan();
    rows_ = left_rows();
    [[maybe_unused]] const typename P::Scope scope = products_.scope();
    if (direct_) {
      team_.for_each(groups_, [&](int64_t group) { multiply_direct(group); });
    } else {
      team_.for_each(panels_ * groups_, [&](int64_t item) { multiply_panel(item / groups_, item % groups_); });
    }
  }

 private:
  // How rows and blocks are cut into items.
  void plan() {
    direct_ = m_ <= P::kMaxDirectRows;
    row_blocks_ = ceil_div(m_, P::kMaxRows);
    panels_ = direct_ ? 1 : ceil_div(row_blocks_, std::max<int64_t>(1, P::kPanelBytes / row_block_bytes()));
    const int64_t pairs_needed = glu_ || row_blocks_ > 1;
    granule_ = pairs_needed ? 2 : 1;
    const int64_t granules = ceil_div(blocks_, granule_);
    const int64_t bytes = units_ * kBlockRows * 4 * granule_;
    const int64_t rows = std::max<int64_t>(1, m_ / panels_);
    const int64_t operations = 2 * rows * k_ * kBlockRows * granule_;
    int64_t wanted = std::max(ceil_div(kItemBytes, bytes), direct_ ? 1 : ceil_div(P::kItemOperations, operations));
    wanted = std::min(wanted, granules / (kItemsPerThread * team_.num_threads));
    const int64_t at_once = P::max_blocks(std::min<int64_t>(m_, P::kMaxRows));
    wanted = std::max(wanted, ceil_div(std::min(kItemBlocks, at_once), granule_));
    const int64_t share = ceil_div(ceil_div(granules, wanted), team_.num_threads) * team_.num_threads;
    groups_ = std::min(granules, share);
    granules_ = granules;
    span_ = row_blocks_ > 1 ? 2 : max_span(m_);
    strip_ = std::max<int64_t>(1, P::kStripBytes / (span_ * units_ * kBlockRows * 4)) * span_;
    keeps_decoded_ = row_blocks_ > 1;
  }

  // Where the rows of the left side lie; computes them first where they are not x itself.
  Rows left_rows() {
    const Tensor& x = op_.tensor[0];
    const Tensor& normed = op_.tensor[9];
    const bool as_it_is = op_.ints[4] == kNoNorm && !op_.tensor[7] && x.dtype == op_.ints[5];
    const bool own = !as_it_is && (!normed || m_ * k_ <= kOwnNormValues);
    const size_t own_row_bytes = aligned(k_ * sizeof(W));
    const size_t own_bytes = own ? own_row_bytes * m_ : 0, sum_bytes = as_it_is ? 0 : aligned(k_ * 4);
    const size_t panel_bytes = direct_ ? 0 : aligned(ceil_div(row_blocks_, panels_) * row_block_bytes());
    char* const scratch = team_.scratch(own_bytes + sum_bytes + panel_bytes + decoded_bytes());
    panel_ = scratch + own_bytes + sum_bytes;
    decoded_ = reinterpret_cast<uint32_t*>(panel_ + panel_bytes);
    if (as_it_is) return {x.as<char>(), x.stride[0] * static_cast<int64_t>(sizeof(W))};

    const NormSettings norm =
        norm_settings(op_.ints[4], op_.floats[0], op_.floats[1], op_.tensor[5], op_.tensor[6]);
    const Prologue<W> prologue(x, op_.tensor[7], op_.tensor[8], norm, k_);
    float* const sum = reinterpret_cast<float*>(scratch + own_bytes);
    if (own) {
      for (int64_t m = 0; m < m_; m++)
        prologue(m, reinterpret_cast<W*>(scratch + m * own_row_bytes), sum, team_.thread == 0);
      return {scratch, static_cast<int64_t>(own_row_bytes)};
    }
    team_.for_each(m_, [&](int64_t m) { prologue(m, normed.as<W>() + m * normed.stride[0], sum, true); });
    return {normed.as<char>(), normed.stride[0] * static_cast<int64_t>(sizeof(W))};
  }

  int64_t group_begin(int64_t group) const {
    return std::min(blocks_, part_begin(granules_, groups_, group) * granule_);
  }

  // All rows, straight from memory, with one group of blocks.
  void multiply_direct(int64_t group) {
    constexpr int64_t kDepth = 4 / sizeof(W);
    const Left left = {rows_.data, rows_.row_bytes, k_ / kDepth, k_ % kDepth != 0};
    multiply(left, 0, m_, group_begin(group), group_begin(group + 1), false, true);
    finish_all();
  }

  // The rows of one panel with one group of blocks: the weights of a strip of blocks serve all row blocks.
  void multiply_panel(int64_t panel, int64_t group) {
    const int64_t first = part_begin(row_blocks_, panels_, panel), last = part_begin(row_blocks_, panels_, panel + 1);
    const int64_t stride = row_block_bytes();
    if (panel != filled_panel_) {
      for (int64_t i = first; i < last; i++)
        products_.fill(rows_.data + row_begin(i) * rows_.row_bytes, rows_.row_bytes, row_begin(i + 1) - row_begin(i),
                       k_, panel_ + (i - first) * stride);
      filled_panel_ = panel;
    }
    const int64_t end = group_begin(group + 1);
    for (int64_t block = group_begin(group); block < end; block += strip_) {
      for (int64_t i = first; i < last; i++) {
        const int64_t rows = row_begin(i + 1) - row_begin(i);
        const Left left = products_.in_panel(panel_ + (i - first) * stride, rows, units_);
        multiply(left, row_begin(i), rows, block, std::min(end, block + strip_), true, i == first);
      }
    }
    finish_all();
  }

  int64_t row_begin(int64_t row_block) const {
    return std::min(m_, part_begin(ceil_div(m_, P::kRowGranule), row_blocks_, row_block) * P::kRowGranule);
  }
  int64_t row_block_bytes() const { return panel_width(P::kMaxRows) * units_ * 4; }

  // Blocks whose sums wait together for the epilogue; with glu a gate waits for its up.
  int64_t max_span(int64_t rows) const {
    const int64_t at_once = P::max_blocks(rows);
    return glu_ && at_once % 2 != 0 ? 2 * at_once : at_once;
  }

  // Some rows with blocks `begin` to `end`; `fresh` says that those have not been decoded for other rows before. Leaves
  // the last sums to be finished.
  void multiply(const Left& left, int64_t first_row, int64_t rows, int64_t begin, int64_t end, bool panel, bool fresh) {
    const int64_t stride = span_ * kBlockRows;
    const int64_t at_once = std::min<int64_t>(P::max_blocks(rows), is_coded_ && fresh ? kCodedBlocks : kMaxSpan);
    for (int64_t block = begin; block < end; block += span_) {
      const int64_t count = std::min(span_, end - block);
      float* const sums = waiting_.num_rows > 0 && waiting_.sums == sums_[0] ? sums_[1] : sums_[0];
      const SumTile tile = {sums, stride, first_row, rows, block, count};
      if (waiting_.num_rows > 0) epilogue_.prefetch(waiting_);
      finished_ = 0;
      int64_t depth = 0;
      auto meanwhile = [&] {
        if (++depth > kDepthsToFetch && depth % 2 == 0) finish(kRowsMeanwhile);
      };
      const int64_t parts = ceil_div(count, at_once);
      for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part_begin(count, parts, part), blocks = part_begin(count, parts, part + 1) - first;
        float* const to = sums + first * kBlockRows;
        if (!is_coded_) {
          const uint32_t* const weights = weight_ + (block + first) * units_ * kBlockRows;
          products_.multiply(left, rows, panel, weights, units_, blocks, to, stride, meanwhile);
          continue;
        }
        const DecodedRuns runs = decoded(block + first - begin);
        if (fresh) {
          products_.multiply(left, rows, panel, coded_, block + first, blocks, runs, to, stride, meanwhile);
        } else {
          products_.multiply(left, rows, panel, runs.data, runs.block_units, blocks, to, stride, meanwhile);
        }
      }
      finish(P::kMaxRows);
      waiting_ = tile;
      finished_ = 0;
    }
  }

  // Up to so many rows of the sums that wait.
  TF_INLINE void finish(int64_t rows) {
    rows = std::min(rows, waiting_.num_rows - finished_);
    if (rows <= 0) return;
    SumTile part = waiting_;
    part.sums += finished_ * part.stride;
    part.first_row += finished_;
    part.num_rows = rows;
    epilogue_(part);
    finished_ += rows;
  }
  void finish_all() {
    finish(P::kMaxRows);
    waiting_.num_rows = 0;
  }

  // Where the decoded weights of a block of a strip are: all of them if more rows are to come, else one run, which stays
  // in the first-level cache.
  DecodedRuns decoded(int64_t block) const {
    if (!keeps_decoded_) return {decoded_, kRunUnits, 0};
    return {decoded_ + block * coded_.decoded_units() * kBlockRows, coded_.decoded_units(), kRunUnits};
  }
  int64_t decoded_bytes() const {
    if (!is_coded_) return 0;
    const int64_t kept = std::min(strip_, blocks_) * coded_.decoded_units();
    return (keeps_decoded_ ? kept : kCodedBlocks * kRunUnits) * kBlockRows * 4;
  }

  static constexpr int64_t kMaxSpan = 6;
  // Rows of sums that are finished at every other depth of the next product, once what they need has been fetched.
  static constexpr int64_t kRowsMeanwhile = 8, kDepthsToFetch = 4;

  const Op& op_;
  Team& team_;
  const int64_t m_, k_;
  const bool glu_;
  const int64_t units_, blocks_;
  const uint32_t* const weight_;
  const ShortBf16 coded_;  // the same
  const bool is_coded_;
  const P products_;
  const Epilogue epilogue_;

  bool direct_;
  int64_t row_blocks_, panels_, groups_;
  int64_t granule_, granules_;  // blocks that stay together, and how many such there are
  int64_t span_, strip_;        // blocks whose sums wait together, and that all rows of a panel pass by
  bool keeps_decoded_;
  Rows rows_;
  char* panel_;
  uint32_t* decoded_;
  int64_t filled_panel_ = -1;
  SumTile waiting_ = {};  // sums that the epilogue has not finished yet
  int64_t finished_ = 0;  // of its rows
  alignas(64) float sums_[2][P::kMaxRows * kMaxSpan * kBlockRows];
};

}  // namespace

void linear(const Op& op, Team& team) {
  if (op.ints[5] == kBFloat16) return Linear<bf16>(op, team).run();
  Linear<float>(op, team).run();
}

}  // namespace transfuse
