// The operations of the op `elementwise`, by number.
#pragma once

#include <cstdint>

namespace transfuse {

enum ElementwiseOperation : int32_t {
  kCopy = 0,  // also from an integer or a bool
  kAdd = 1,   // a + floats[0] * b
  kSubtract = 2,
  kMultiply = 3,
  kDivide = 4,
  kAffine = 5,  // a * floats[0] + floats[1]
  kElementTanh = 6,
  kElementSigmoid = 7,
  kElementSilu = 8,
  kElementGelu = 9,
  kElementGeluTanh = 10,
  kElementRelu = 11,
  kExp = 12,
  kRsqrt = 13,
  kSquare = 14,
  kCos = 15,
  kSin = 16,
  kClamp = 17,  // to floats[0] .. floats[1]
  kElementQuickGelu = 18,
  kNegative = 19,
  kElementRelu2 = 20,
  kSoftplus = 21,
  kReciprocal = 22,
  kAbsolute = 23,
  kPower = 24,  // a to the power of floats[0]
  kMinimum = 25,
  kMaximum = 26,
  kSquareRoot = 27,
  kLogarithm = 28,
  kDivideBy = 29,  // a / floats[0]
  kNumOperations,
};

}  // namespace transfuse
