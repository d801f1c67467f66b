#pragma once
// A warp, or an aligned part of one, owns a row: reductions by shuffles alone.

#include "../common/reduce.cuh"

namespace megasoftmax {

template <int kThreadsPerRow, int kRowsPerBlock>
struct WarpRow {
  static_assert(kThreadsPerRow <= 32);
  static constexpr int kThreads = kThreadsPerRow;

  __device__ int thread() const { return threadIdx.x % kThreadsPerRow; }
  __device__ int row_in_block() const { return threadIdx.x / kThreadsPerRow; }

  __device__ MaxAndSum merge(MaxAndSum mine, Exponent exponent) {
    return warp_merge<kThreads>(mine, exponent);
  }
  __device__ float sum(float mine) { return warp_sum<kThreads>(mine); }
};

}  // namespace megasoftmax
