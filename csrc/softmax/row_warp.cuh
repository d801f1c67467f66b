#pragma once
// A warp, or an aligned part of one, owns a row: reductions by shuffles alone.

#include "../common/reduce.cuh"

namespace megasoftmax {

template <int kThreadsPerRow>
struct WarpRow {
  static_assert(kThreadsPerRow <= 32);

  __device__ int thread() const { return threadIdx.x % kThreadsPerRow; }
  // The first of the warp that works on the row.
  __device__ static constexpr int first_thread() { return 0; }
  __device__ int row_in_block() const { return threadIdx.x / kThreadsPerRow; }

  __device__ MaxAndSum merge(MaxAndSum mine, Exponent exponent) {
    return warp_merge<kThreadsPerRow>(mine, exponent);
  }
  __device__ float sum(float mine) { return warp_sum<kThreadsPerRow>(mine); }
};

}  // namespace megasoftmax
