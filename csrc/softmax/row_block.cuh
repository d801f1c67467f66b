#pragma once
// A block owns a row: one barrier per reduction, because consecutive ones alternate between two
// buffers.

#include "../common/reduce.cuh"

namespace megasoftmax {

template <int kThreadsPerRow>
struct BlockRow {
  static constexpr int kThreads = kThreadsPerRow;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps > 1 && kWarps <= 32 && kThreads % 32 == 0);

  MaxAndSum (*partial)[kWarps];
  int parity = 0;

  __device__ BlockRow() {
    __shared__ MaxAndSum buffers[2][kWarps];
    partial = buffers;
  }

  __device__ int thread() const { return threadIdx.x; }
  // The first of the warp; of a shuffle the compiler knows that it is the same for all lanes.
  __device__ static int first_thread() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), 0);
  }
  __device__ int row_in_block() const { return 0; }

  __device__ MaxAndSum merge(MaxAndSum mine, Exponent exponent) {
    mine = warp_merge<32>(mine, exponent);
    const MaxAndSum* all = exchange(mine);
    if constexpr (kWarps <= 4) {
      MaxAndSum total = all[0];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) total.merge(all[warp], exponent);
      return total;
    } else {
      return warp_merge<kWarps>(all[threadIdx.x % kWarps], exponent);
    }
  }

  __device__ float sum(float mine) {
    const MaxAndSum* all = exchange({0.f, warp_sum<32>(mine)});
    return warp_sum<kWarps>(all[threadIdx.x % kWarps].sum);
  }

 private:
  __device__ const MaxAndSum* exchange(MaxAndSum of_warp) {
    MaxAndSum* buffer = partial[parity];
    parity ^= 1;
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return buffer;
  }
};

}  // namespace megasoftmax
