#pragma once
// The warps of a block share a row that one warp could own: each has one of the chunks of every
// lane. They sum as that warp does, lane by lane in the order of chunks, so the bits are the same.

#include "../common/reduce.cuh"

namespace megasoftmax {

template <int kThreads>
class WarpsRow {
 public:
  __device__ WarpsRow() {
    __shared__ float shared_maxima[kWarps][32], shared_sums[kWarps][32];
    maxima_ = shared_maxima;
    sums_ = shared_sums;
  }

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ static int first_thread() { return static_cast<int>(threadIdx.x) / 32 * 32; }
  __device__ int row_in_block() const { return 0; }

  // Over the chunks of a lane.
  __device__ float max_of_lane(float of_chunk) const {
    share(maxima_, of_chunk);
    float max = maxima_[0][lane()];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) max = fmaxf(max, maxima_[warp][lane()]);
    return max;
  }
  // `of_chunk` is relative to the maximum of the lane.
  __device__ MaxAndSum merge(MaxAndSum of_chunk, Exponent exponent) const {
    share(sums_, of_chunk.sum);
    MaxAndSum of_lane{of_chunk.max, sums_[0][lane()]};
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) of_lane.sum += sums_[warp][lane()];
    return warp_merge<32>(of_lane, exponent);
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps > 1 && kThreads % 32 == 0);

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static void share(float (*shared)[32], float mine) {
    shared[threadIdx.x / 32][lane()] = mine;
    __syncthreads();
  }

  float (*maxima_)[32], (*sums_)[32];
};

}  // namespace megasoftmax
