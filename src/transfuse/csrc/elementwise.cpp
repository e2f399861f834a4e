// One operation on each element, in float32 and rounded once.
//
// Tensors: 0 a, 1 b (of binary operations), 2 out: the same sizes, up to 4 dimensions, any strides; a stride of 0
// repeats an element. float32 and bfloat16 in any mixture; `a` of a copy may also be of integers or bools.
// Integers: 0 operation (ElementwiseOperation). Floats: 0, 1 scalars.
#include "elementwise.h"

#include <algorithm>
#include <utility>

#include "activations.h"
#include "kernels.h"
#include "strided.h"
#include "team.h"

namespace transfuse {

namespace {

// Elements that one thread works on before it asks for more; fewer are not worth a second thread.
constexpr int64_t kChunk = 4096;

struct Scalars {
  float first;
  float second;
};

f32x16 power(f32x16 x, float exponent) {
  if (exponent == 2.0f) return x * x;
  if (exponent == 3.0f) return x * x * x;
  if (exponent == 0.5f) return sqrt(x);
  if (exponent == -0.5f) return 1.0f / sqrt(x);
  if (exponent == -1.0f) return 1.0f / x;
  for (int i = 0; i < kLanes; i++) x[i] = std::pow(x[i], exponent);
  return x;
}

// A NaN is what is kept where numbers are compared.
template <int kOperation>
TF_INLINE f32x16 compute(f32x16 a, f32x16 b, Scalars s) {
  switch (kOperation) {
    case kCopy: return a;
    case kAdd: return fma(b, broadcast(s.first), a);
    case kSubtract: return a - b;
    case kMultiply: return a * b;
    case kDivide: return a / b;
    case kAffine: return fma(a, broadcast(s.first), broadcast(s.second));
    case kElementTanh: return tanh(a);
    case kElementSigmoid: return sigmoid(a);
    case kElementSilu: return activate<kSilu>(a);
    case kElementGelu: return activate<kGelu>(a);
    case kElementGeluTanh: return activate<kGeluTanh>(a);
    case kElementRelu: return activate<kRelu>(a);
    case kExp: return exp(a);
    case kRsqrt: return 1.0f / sqrt(a);
    case kSquare: return a * a;
    case kCos: return sin_cos(a).cos;
    case kSin: return sin_cos(a).sin;
    case kClamp: return min(broadcast(s.second), max(broadcast(s.first), a));
    case kElementQuickGelu: return activate<kQuickGelu>(a);
    case kNegative: return -a;
    case kElementRelu2: return activate<kRelu2>(a);
    case kSoftplus: return softplus(a);
    case kReciprocal: return 1.0f / a;
    case kAbsolute: return abs(a);
    case kPower: return power(a, s.first);
    case kMinimum: return select((a < b) | (a != a), a, b);
    case kMaximum: return select((a > b) | (a != a), a, b);
    case kSquareRoot: return sqrt(a);
    case kLogarithm: return log(a);
    case kDivideBy: return a / s.first;
    default: return a;
  }
}

constexpr bool is_binary(int operation) {
  return (operation >= kAdd && operation <= kDivide) || operation == kMinimum || operation == kMaximum;
}

// n elements along one dimension.
template <int kOperation>
void run_line(const Line (&line)[3], int64_t n, Scalars s) {
  const auto piece = [&](int64_t i, int64_t count) {
    const f32x16 a = read(line[0], i, count);
    f32x16 b{};
    if constexpr (is_binary(kOperation)) b = read(line[1], i, count);
    write(line[2], i, count, compute<kOperation>(a, b, s));
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) piece(i, kLanes);
  if (i < n) piece(i, n - i);
}

using LineFunction = void (*)(const Line (&line)[3], int64_t n, Scalars s);

template <size_t... kOperations>
LineFunction line_function(int64_t operation, std::index_sequence<kOperations...>) {
  constexpr LineFunction functions[] = {run_line<kOperations>...};
  return functions[operation];
}

// A copy to the same dtype, which may be one that is not computed with.
void copy_line(const Line (&line)[3], int64_t n, Scalars) {
  const Line &from = line[0], &to = line[2];
  const int64_t size = static_cast<int64_t>(item_size(to.dtype));
  if (from.stride == 1 && to.stride == 1) {
    std::memcpy(to.data, from.data, n * size);
    return;
  }
  for (int64_t i = 0; i < n; i++) std::memcpy(to.data + i * to.stride * size, from.data + i * from.stride * size, size);
}

}  // namespace

void elementwise(const Op& op, Team& team) {
  const Tensor &a = op.tensor[0], &b = op.tensor[1], &out = op.tensor[2];
  const bool is_plain_copy = op.ints[0] == kCopy && a.dtype == out.dtype;
  const LineFunction function =
      is_plain_copy ? copy_line : line_function(op.ints[0], std::make_index_sequence<kNumOperations>());
  const Scalars scalars = {static_cast<float>(op.floats[0]), static_cast<float>(op.floats[1])};
  const Walk<3> walk({a, b, out}, kChunk);
  walk.run(team, [&](const Line(&line)[3], int64_t n) { function(line, n, scalars); });
}

}  // namespace transfuse
