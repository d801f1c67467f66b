#pragma once
// Constants and helpers of the arithmetic that the kernels share.

#include "ptx.cuh"

namespace megasoftmax {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// Running maxima start here, not at -inf: a chunk of -inf then adds 0, and (-inf) - (-inf) never happens.
inline constexpr float kLowest = -3.402823466e+38f;

// Pairwise, so that few operations wait for each other.
template <int kCount, class Operation>
__device__ inline float reduce_pairwise(const float (&values)[kCount], Operation&& operation) {
  static_assert((kCount & (kCount - 1)) == 0);
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    float halves[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) halves[i] = operation(values[2 * i], values[2 * i + 1]);
    return reduce_pairwise(halves, operation);
  }
}

}  // namespace megasoftmax
