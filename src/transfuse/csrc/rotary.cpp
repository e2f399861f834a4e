// Rotary position embedding (https://arxiv.org/abs/2104.09864) of queries and keys, their norms before it, and the
// store of keys and values in their slots of the paged cache.
//
// Tensors: 0 query [T, num_heads, D], 1 key [T, num_kv_heads, D], 2 value [T, num_kv_heads, Dv], 3 cos [T, R'], 4 sin,
// 5 query norm's weight [D], 6 key norm's weight [D], 7 query out, 8 key out, 9 key cache [blocks, num_kv_heads,
// block_size, D], 10 value cache, 11 slots i64 [n], n <= T; each is optional. Rows from n on and slots below 0 are not
// stored. Integers: 0 interleaved, 1 angles (`Angles`), 2 inverse, 3 gathered, 4 and 5 kind of the query's and the
// key's norm (0 none, 1 RMS, 2 layer). Floats: 0 and 1 epsilon and offset of the query's norm, 2 and 3 of the key's.
//
// The arithmetic is in float32, rounded once at the end.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "norm_row.h"
#include "team.h"
#include "tensor_row.h"
#include "vec.h"

namespace transfuse {

namespace {

// How the angles of the pairs lie in `cos` and `sin`: one for each dimension; as that, but only the first half counts;
// one for each pair.
enum Angles { kPaired = 0, kFirst = 1, kSingle = 2 };

// What turns the heads of one token.
class Rotation {
 public:
  explicit Rotation(const Op& op)
      : cos_(op.tensor[3]),
        sin_(op.tensor[4]),
        interleaved_(op.ints[0] != 0),
        angles_(op.ints[1]),
        inverse_(op.ints[2] != 0),
        gathered_(op.ints[3] != 0),
        half_(!cos_ ? 0 : angles_ == kSingle ? cos_.size[1] : cos_.size[1] / 2),
        stride_(padded(half_)) {}

  int64_t scratch_floats() const { return 6 * stride_ + padded(2 * half_); }

  // Takes the angles of a token.
  void start(int64_t token, float* scratch) {
    cos_a_ = scratch;
    cos_b_ = cos_a_ + stride_;
    sin_a_ = cos_b_ + stride_;
    sin_b_ = sin_a_ + stride_;
    a_ = sin_b_ + stride_;
    b_ = a_ + stride_;
    row_ = b_ + stride_;
    if (half_ == 0) return;
    spread(cos_, token, cos_a_, cos_b_);
    spread(sin_, token, sin_a_, sin_b_);
    if (!inverse_) return;
    for (int64_t i = 0; i < 2 * stride_; i++) sin_a_[i] = -sin_a_[i];
  }

  // Turns the pairs among the first numbers of a head, which lies in whole vectors; the others stay.
  void turn(float* x) const {
    if (!interleaved_ && half_ % kLanes == 0) {
      turn_pairs(x, x + half_);
      return;
    }
    const bool scattered = interleaved_ && !gathered_;
    for (int64_t i = 0; i < half_; i++) {
      a_[i] = x[interleaved_ ? 2 * i : i];
      b_[i] = x[interleaved_ ? 2 * i + 1 : half_ + i];
    }
    turn_pairs(a_, b_);
    for (int64_t i = 0; i < half_; i++) {
      x[scattered ? 2 * i : i] = a_[i];
      x[scattered ? 2 * i + 1 : half_ + i] = b_[i];
    }
  }

 private:
  // Both are read and written in whole vectors.
  void turn_pairs(float* first, float* second) const {
    for (int64_t i = 0; i < half_; i += kLanes) {
      const f32x16 a = load(first + i), b = load(second + i);
      store(first + i, fma(a, load(cos_a_ + i), -(b * load(sin_a_ + i))));
      store(second + i, fma(b, load(cos_b_ + i), a * load(sin_b_ + i)));
    }
  }

  // The angles of the first and of the second number of each pair.
  void spread(const Tensor& table, int64_t token, float* a, float* b) {
    const int64_t offset = token * table.stride[0];
    if (angles_ != kPaired) {
      read_row(table, offset, half_, a);
      std::memcpy(b, a, stride_ * sizeof(float));
      return;
    }
    std::memset(a, 0, 2 * stride_ * sizeof(float));
    read_row(table, offset, 2 * half_, row_);
    // Angles lie as the turned numbers do.
    const bool scattered = interleaved_ && !gathered_;
    for (int64_t i = 0; i < half_; i++) {
      a[i] = row_[scattered ? 2 * i : i];
      b[i] = row_[scattered ? 2 * i + 1 : half_ + i];
    }
  }

  const Tensor &cos_, &sin_;
  const bool interleaved_;
  const int64_t angles_;
  const bool inverse_, gathered_;
  const int64_t half_, stride_;
  float *cos_a_, *cos_b_, *sin_a_, *sin_b_, *a_, *b_, *row_;
};

// One thread's work.
class RotaryCache {
 public:
  RotaryCache(const Op& op, Team& team) : op_(op), team_(team), rotation_(op) {
    const Tensor& any = query() ? query() : key() ? key() : value();
    num_tokens_ = any ? any.size[0] : 0;
    num_query_heads_ = query() ? query().size[1] : 0;
    num_kv_heads_ = key() ? key().size[1] : value() ? value().size[1] : 0;
    max_size_ = std::max({query() ? query().size[2] : 0, key() ? key().size[2] : 0, value() ? value().size[2] : 0});
    query_norm_ = norm_settings(op.ints[4], op.floats[0], op.floats[1], op.tensor[5], Tensor{});
    key_norm_ = norm_settings(op.ints[5], op.floats[2], op.floats[3], op.tensor[6], Tensor{});
  }

  void run() {
    const int64_t num_heads = num_query_heads_ + num_kv_heads_;
    // A few tokens are shared out by heads, many as they are.
    const int64_t parts = num_tokens_ < 4 * team_.num_threads ? std::min<int64_t>(num_heads, team_.num_threads) : 1;
    team_.for_each(num_tokens_ * parts, [&](int64_t i) {
      const int64_t token = i / parts, part = i % parts;
      compute(token, num_heads * part / parts, num_heads * (part + 1) / parts);
    });
  }

 private:
  const Tensor& query() const { return op_.tensor[0]; }
  const Tensor& key() const { return op_.tensor[1]; }
  const Tensor& value() const { return op_.tensor[2]; }

  // Heads [begin, end) of a token: those of the query, then those of key and value.
  void compute(int64_t token, int64_t begin, int64_t end) {
    const int64_t width = padded(max_size_);
    float* head = reinterpret_cast<float*>(
        team_.scratch((width + rotation_.scratch_floats()) * sizeof(float)));
    rotation_.start(token, head + width);
    for (int64_t h = begin; h < std::min(end, num_query_heads_); h++) {
      turn_head(query(), query_norm_, token, h, head);
      if (op_.tensor[7]) write_head(op_.tensor[7], token, h, head);
    }
    if (end <= num_query_heads_) return;
    const int64_t slot = find_slot(token);
    for (int64_t h = std::max<int64_t>(0, begin - num_query_heads_); h < end - num_query_heads_; h++) {
      if (key()) {
        turn_head(key(), key_norm_, token, h, head);
        if (op_.tensor[8]) write_head(op_.tensor[8], token, h, head);
        if (op_.tensor[9] && slot >= 0) store_head(op_.tensor[9], slot, h, head);
      }
      if (value() && op_.tensor[10] && slot >= 0) {
        read_row(value(), token * value().stride[0] + h * value().stride[1], value().size[2], head);
        store_head(op_.tensor[10], slot, h, head);
      }
    }
  }

  void turn_head(const Tensor& tensor, const NormSettings& norm, int64_t token, int64_t h, float* head) {
    read_row(tensor, token * tensor.stride[0] + h * tensor.stride[1], tensor.size[2], head);
    if (norm.kind != kNoNorm) norm_row(head, head, tensor.size[2], norm);
    rotation_.turn(head);
  }

  static void write_head(const Tensor& out, int64_t token, int64_t h, const float* head) {
    write_row(out, token * out.stride[0] + h * out.stride[1], out.size[2], head);
  }

  static void store_head(const Tensor& cache, int64_t slot, int64_t h, const float* head) {
    const int64_t block = slot / cache.size[2], offset = slot % cache.size[2];
    write_row(cache, block * cache.stride[0] + h * cache.stride[1] + offset * cache.stride[2], cache.size[3], head);
  }

  // -1 where a token is not stored.
  int64_t find_slot(int64_t token) {
    const Tensor &slots = op_.tensor[11], &cache = op_.tensor[9] ? op_.tensor[9] : op_.tensor[10];
    if (!slots || !cache || token >= slots.size[0]) return -1;
    const int64_t slot = slots.as<int64_t>()[token * slots.stride[0]];
    if (slot < cache.size[0] * cache.size[2]) return slot;
    team_.fail(1);
    return -1;
  }

  const Op& op_;
  Team& team_;
  Rotation rotation_;
  int64_t num_tokens_, num_query_heads_, num_kv_heads_, max_size_;
  NormSettings query_norm_, key_norm_;
};

}  // namespace

void rotary_cache(const Op& op, Team& team) { RotaryCache(op, team).run(); }

}  // namespace transfuse
