#pragma once
// Reductions over the threads that own a row: part of a warp, a warp, or a block.

#include <cmath>

#include "math.cuh"
#include "ptx.cuh"

namespace megasoftmax {

// A sum of exponentials relative to a maximum: sum 2^((x - max) * c).
struct MaxAndSum {
  float max;
  float sum;

  // What carries a sum relative to `max` over to `new_max`. As a difference first: the product of a large maximum alone
  // could overflow.
  __device__ static float carry(float max, float new_max, float exponent_scale) {
    return exp2_approximate((max - new_max) * exponent_scale);
  }

  __device__ void merge(MaxAndSum other, float exponent_scale) {
    const float merged = fmaxf(max, other.max);
    sum = sum * carry(max, merged, exponent_scale) + other.sum * carry(other.max, merged, exponent_scale);
    max = merged;
  }
};

// Not for NaN. A whole warp takes one integer reduction: floats order as integers once negative ones are mirrored.
template <int kThreads>
__device__ inline float warp_max(float x) {
  if constexpr (kThreads == 32) {
    const auto mirror = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(mirror(__reduce_max_sync(0xffffffffu, mirror(__float_as_int(x)))));
  }
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
  return {max, warp_sum<kThreads>(mine.sum * MaxAndSum::carry(mine.max, max, exponent_scale))};
}

}  // namespace megasoftmax
