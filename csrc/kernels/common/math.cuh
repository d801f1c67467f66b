#pragma once
// Arithmetic that the kernels share.

#include "ptx.cuh"

namespace megasoftmax {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// Running maxima start here, not at -inf: a chunk of -inf then adds 0, and (-inf) - (-inf) never
// happens.
inline constexpr float kLowest = -3.402823466e+38f;

// 2^((x - max) * c). For c <= 1 no product with c overflows, and one multiply-add serves: what max
// * c loses in rounding is the same for every x, and cancels as long as sums are carried from one
// maximum to another with the same products.
struct Exponent {
  float c;

  __device__ bool is_fused() const { return c <= 1.f; }

  template <int kCount>
  __device__ void raise(float (&x)[kCount], float max) const {
    const float max_log2 = __fmul_rn(max, c);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = exp2_approximate(is_fused() ? fmaf(x[i], c, -max_log2) : (x[i] - max) * c);
    }
  }

  // What carries a sum relative to `max` over to `new_max`.
  __device__ float carry(float max, float new_max) const {
    return exp2_approximate(is_fused() ? __fmul_rn(max, c) - __fmul_rn(new_max, c)
                                       : (max - new_max) * c);
  }
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
