// Log-probabilities and ranks of a given token and of the most likely ones, under a row's own distribution.
//
// Tensors: 0 logits [S, V] (float32 or bfloat16, row stride free; without NaN and +inf), 1 rows i64 [n], 2 tokens i64
// [n], and, each [n, 1 + k] with the given token first, 3 ids i64, 4 logprobs f32, 5 ranks i64: one more than the
// number of tokens with a strictly greater logit. Integers: 0 k, at most V.
#include "float_types.h"
#include "kernels.h"
#include "team.h"
#include "top_tokens.h"

namespace transfuse {

namespace {

struct Report {
  int64_t* ids;
  float* logprobs;
  int64_t* ranks;
};

template <class T>
void report_row(const T* row, int64_t n, int64_t k, int64_t token, RankedToken* room, const Report& report) {
  const float highest = row_max(row, n).value, given = to_float(row[token]);
  double total = 0.0;
  sum_weights(row, n, {highest, 1.0f, -INFINITY}, [&](double sum, int64_t, int64_t) { total += sum; });
  const double log_total = highest + std::log(total);
  const auto logprob = [&](float logit) { return static_cast<float>(logit - log_total); };

  int64_t num_greater = 0;
  scan_row(row, n, [&](f32x16 v, int64_t, int) { num_greater += __builtin_popcount(mask_bits(v > broadcast(given))); });
  report.ids[0] = token;
  report.logprobs[0] = logprob(given);
  report.ranks[0] = num_greater + 1;
  if (k == 0) return;
  top_tokens(row, n, k, room);
  for (int64_t i = 0; i < k; i++) {
    report.ids[1 + i] = room[i].id();
    report.logprobs[1 + i] = logprob(room[i].logit());
    const bool ties = i > 0 && room[i].logit() == room[i - 1].logit();
    report.ranks[1 + i] = ties ? report.ranks[i] : i + 1;
  }
}

}  // namespace

void ranked_logprobs(const Op& op, Team& team) {
  const Tensor& logits = op.tensor[0];
  const int64_t *rows = op.tensor[1].as<int64_t>(), *tokens = op.tensor[2].as<int64_t>();
  const int64_t n = logits.size[1], k = op.ints[0];
  team.for_each(op.tensor[1].size[0], [&](int64_t i) {
    auto* room = reinterpret_cast<RankedToken*>(team.scratch(top_tokens_room(k) * sizeof(RankedToken)));
    const Report report = {op.tensor[3].as<int64_t>() + i * (k + 1), op.tensor[4].as<float>() + i * (k + 1),
                           op.tensor[5].as<int64_t>() + i * (k + 1)};
    const char* data = logits.as<char>() + rows[i] * logits.stride[0] * static_cast<int64_t>(item_size(logits.dtype));
    with_floats(data, logits.dtype, [&](const auto* row) { report_row(row, n, k, tokens[i], room, report); });
  });
}

}  // namespace transfuse
