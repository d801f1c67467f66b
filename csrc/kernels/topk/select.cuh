#pragma once
// The k best of many keys, by a block: collect what reaches a threshold that k of them certainly
// reach, then rank it. Where too much reaches it, as in a row of one value, the k-th best of what
// was collected is a threshold that less reaches.

#include "keys.cuh"
#include "limits.h"

namespace megasoftmax {

template <int kThreads>
struct Selection {
  // Per warp: groups that may hold a candidate. Once kFlush are there the warp looks at them.
  static constexpr int kWarps = kThreads / 32, kFlush = 32;
  // With more delegates fewer candidates pass, and finding the threshold takes longer.
  static constexpr int kFewDelegates = kThreads, kManyDelegates = 2 * kThreads;

  uint64_t candidates[kMaxCandidates];
  uint64_t sorted[kMaxK];
  uint64_t delegates[kManyDelegates];
  int waiting[kWarps][2 * kFlush];
  uint64_t threshold;
  int count;  // of candidates, those that found no place too

  // By a whole warp.
  __device__ void append(bool is_candidate, uint64_t key) {
    const unsigned votes = __ballot_sync(~0u, is_candidate);
    if (votes == 0) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int first = 0;
    if (lane == 0) first = atomicAdd(&count, __popc(votes));
    const int at = __shfl_sync(~0u, first, 0) + __popc(votes & ((1u << lane) - 1));
    if (is_candidate && at < kMaxCandidates) candidates[at] = key;
  }
  // Likewise: the same answer for all lanes.
  __device__ bool is_full() const {
    return __shfl_sync(~0u, *static_cast<const volatile int*>(&count), 0) > kMaxCandidates;
  }

  // Leaves the k best in `sorted`. The delegates are distinct keys, or lower than distinct ones;
  // collect(threshold) appends every key from the threshold on.
  template <class Collect>
  __device__ void select(int k, bool has_many_delegates, Collect&& collect) {
    constexpr int kFew = kFewDelegates / 32, kMany = kManyDelegates / 32;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
      const int delegate_count = has_many_delegates ? kManyDelegates : kFewDelegates;
      uint64_t found = kNoKey;
      if (k <= delegate_count)
        found = has_many_delegates ? kth_largest_key<kMany>(delegates, delegate_count, k)
                                   : kth_largest_key<kFew>(delegates, delegate_count, k);
      if (threadIdx.x == 0) threshold = found;
    }
    __syncthreads();
    for (;;) {
      collect(threshold);
      __syncthreads();
      if (count <= kMaxCandidates) break;
      if (threadIdx.x < 32) {
        const uint64_t found =
            kth_largest_key<kMaxCandidates / 32>(candidates, kMaxCandidates, k);
        __syncwarp();
        if (threadIdx.x == 0) {
          threshold = found;
          count = 0;
        }
      }
      __syncthreads();
    }
    for (int i = static_cast<int>(threadIdx.x); i < k; i += kThreads) sorted[i] = kNoKey;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const uint64_t mine = candidates[i];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) rank += candidates[j] > mine;
      if (rank < k) sorted[rank] = mine;
    }
    __syncthreads();
  }
};

}  // namespace megasoftmax
