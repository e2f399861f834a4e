// Draws one token from each row's filtered distribution with one given uniform number.
//
// Tensors: 0 logits [S, V] (float32 or bfloat16, row stride free; without NaN and +inf, each row with a finite number
// among the tokens allowed), 1 settings: bytes, an array of n DrawSettings, 2 tokens i64 [n], 3 masks [M, W], see
// masks.h. Integers: 0 W.
#include "kernels.h"
#include "masks.h"
#include "nucleus.h"
#include "team.h"

namespace transfuse {

namespace {

// As kernels/cpu/sampling.py has it. Temperature, min_p, top_k and top_p act in this order.
struct DrawSettings {
  int64_t row;
  int64_t mask;        // -1: none
  int64_t top_k;       // V where it is off
  double temperature;  // above 0
  double log_min_p;    // -inf where it is off
  double top_p;        // 1 where it is off
  double uniform;      // in [0, 1)
};

int64_t rounded_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// In the order of ids: the sums of blocks lead to the block that the draw falls into.
template <class Row>
int64_t draw_unsorted(Row row, int64_t n, const Weighing& weigh, double uniform, double* mass) {
  int64_t num_blocks = 0;
  double total = 0.0;
  sum_weights(row, n, weigh, [&](double sum, int64_t, int64_t) { mass[num_blocks++] = total += sum; });
  const double target = draw_target(uniform, total);
  const int64_t block = std::upper_bound(mass, mass + num_blocks - 1, target) - mass;
  const int64_t first = block * kWeightBlock, count = std::min(kWeightBlock, n - first);
  float weight[kWeightBlock];
  scan_row(row + first, count, [&](f32x16 v, int64_t i, int) { store(weight + i, weigh(v)); });
  return first + place_beyond(weight, count, block > 0 ? mass[block - 1] : 0.0, target);
}

// Among the `top_k` most likely, in the order of likelihood.
template <class Row>
int64_t draw_top(Row row, int64_t n, Weighing weigh, const DrawSettings& s, RankedToken* room, float* weight) {
  top_tokens(row, n, s.top_k, room);
  weigh.max = room[0].logit();
  weigh_tokens(room, s.top_k, weigh, weight);
  double mass = 0.0;
  for (int64_t i = 0; i < s.top_k; i++) mass += weight[i];
  if (s.top_p < 1.0) mass = place_reaching(weight, s.top_k, 0.0, s.top_p * mass).mass;
  return room[place_beyond(weight, s.top_k, 0.0, draw_target(s.uniform, mass))].id();
}

template <class Row>
int64_t draw_token(Row row, int64_t n, const DrawSettings& s, Team& team) {
  Weighing weigh = {0.0f, static_cast<float>(1.0 / s.temperature), static_cast<float>(s.log_min_p)};
  if (s.top_k < n) {
    const int64_t room = top_tokens_room(s.top_k);
    char* data = team.scratch(room * sizeof(RankedToken) + rounded_up(s.top_k) * sizeof(float));
    auto* tokens = reinterpret_cast<RankedToken*>(data);
    return draw_top(row, n, weigh, s, tokens, reinterpret_cast<float*>(tokens + room));
  }
  weigh.max = row_max(row, n).value;
  const int64_t num_masses = std::max(kBins, n / kWeightBlock + 1);
  const bool has_nucleus = s.top_p < 1.0;
  const int64_t num_tokens = has_nucleus ? rounded_up(n) : 0;
  auto* mass = reinterpret_cast<double*>(
      team.scratch(num_masses * sizeof(double) + num_tokens * (sizeof(RankedToken) + sizeof(float))));
  if (!has_nucleus) return draw_unsorted(row, n, weigh, s.uniform, mass);
  auto* tokens = reinterpret_cast<RankedToken*>(mass + num_masses);
  return draw_nucleus(row, n, weigh, s.top_p, s.uniform, {mass, tokens, reinterpret_cast<float*>(tokens + num_tokens)});
}

}  // namespace

void draw(const Op& op, Team& team) {
  const Tensor& logits = op.tensor[0];
  const DrawSettings* settings = op.tensor[1].as<DrawSettings>();
  int64_t* tokens = op.tensor[2].as<int64_t>();
  const Masks masks = {op.tensor[3].as<uint16_t>(), op.ints[0]};
  team.for_each(op.tensor[2].size[0], [&](int64_t i) {
    const DrawSettings& s = settings[i];
    with_row(logits, s.row, masks.at(s.mask), [&](auto row) { tokens[i] = draw_token(row, logits.size[1], s, team); });
  });
}

}  // namespace transfuse
