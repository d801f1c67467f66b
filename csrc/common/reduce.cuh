#pragma once
// Reductions over the threads that own a row: part of a warp, a warp, or a block.

#include "math.cuh"

namespace megasoftmax {

// A sum of exponentials relative to a maximum: sum 2^((x - max) * c).
struct alignas(8) MaxAndSum {
  float max;
  float sum;

  __device__ void merge(MaxAndSum other, Exponent exponent) {
    const float merged = fmaxf(max, other.max);
    sum = sum * exponent(max, merged) + other.sum * exponent(other.max, merged);
    max = merged;
  }
};

// Not for NaN. A whole warp takes one integer reduction where there is one: floats order as
// integers once negative ones are mirrored.
template <int kThreads>
__device__ inline float warp_max(float x) {
  if constexpr (kThreads == 32 && kIsAmpere) {
    const auto mirror = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(mirror(largest_of_lanes(mirror(__float_as_int(x)))));
  } else {
#pragma unroll
    for (int distance = kThreads / 2; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
  }
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
__device__ inline MaxAndSum warp_merge(MaxAndSum mine, Exponent exponent) {
  const float max = warp_max<kThreads>(mine.max);
  return {max, warp_sum<kThreads>(mine.sum * exponent(mine.max, max))};
}

}  // namespace megasoftmax
