#pragma once
// Reductions over the threads that own a row: part of a warp, a warp, or a block.

#include "math.cuh"
#include "ptx.cuh"

namespace megasoftmax {

// A sum of exponentials relative to a maximum: sum 2^((x - max) * c).
struct MaxAndSum {
  float max;
  float sum;

  __device__ void merge(MaxAndSum other, float exponent_scale) {
    const float merged = fmaxf(max, other.max);
    sum = sum * exp2_approximate((max - merged) * exponent_scale) +
          other.sum * exp2_approximate((other.max - merged) * exponent_scale);
    max = merged;
  }
};

template <int kThreads>
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

template <int kThreads>
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// One rescaling per thread, then a plain sum: cheaper than merging pairs.
template <int kThreads>
__device__ inline MaxAndSum warp_merge(MaxAndSum mine, float exponent_scale) {
  const float max = warp_max<kThreads>(mine.max);
  return {max, warp_sum<kThreads>(mine.sum * exp2_approximate((mine.max - max) * exponent_scale))};
}

}  // namespace megasoftmax
