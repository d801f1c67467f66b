#pragma once
// Arithmetic that the kernels share.

#include "ptx.cuh"

namespace megasoftmax {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// Running maxima start here, not at -inf: a vector of -inf then adds 0, and (-inf) - (-inf) never
// happens.
inline constexpr float kLowest = -3.402823466e+38f;

// 2^((x - max) * c). The difference comes first: x * c - max * c in one multiply-add would be an
// instruction less, but loses everything where the scores are large.
struct Exponent {
  float c;

  __device__ float operator()(float x, float max) const { return exp2_approximate((x - max) * c); }
};

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
