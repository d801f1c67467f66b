#pragma once
// Exponentials and the constants around them.

#include <cmath>

#include "ptx.cuh"

namespace megasoftmax {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// Running maxima start here, not at -inf: a chunk of -inf then adds 0, and (-inf) - (-inf) never happens.
inline constexpr float kLowest = -3.402823466e+38f;

// 2^((x - max) * c) for many x. One multiply-add serves where max * c stays finite: its rounding error is the same for
// every x and cancels against the sum.
struct Exponential {
  float max, c, max_log2;
  bool is_fused;

  __device__ Exponential(float max, float c) : max(max), c(c), max_log2(max * c), is_fused(fabsf(max_log2) < 1e38f) {}

  template <int kCount>
  __device__ void apply(float (&x)[kCount]) const {
    if (is_fused) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = exp2_approximate(fmaf(x[i], c, -max_log2));
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = exp2_approximate((x[i] - max) * c);
    }
  }
};

}  // namespace megasoftmax
