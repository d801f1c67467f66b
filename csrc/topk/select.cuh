#pragma once
// The k best of many keys, by a block: collect what reaches a threshold that k of them certainly
// reach, then rank it. Where too much reaches it, as in a row of one value, a threshold of what was
// collected is one that less reaches.

#include "keys.cuh"
#include "limits.h"

namespace megasoftmax {

template <int kThreads>
struct Selection {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kDelegates = kThreads < 256 ? kThreads : 256;
  static constexpr int kMaxWaiting = kThreads < 128 ? 128 : kThreads;
  static constexpr int kFewCandidates = 64;  // to be ranked as they are

  uint64_t candidates[kMaxCandidates];
  uint32_t delegates[2][kDelegates];  // of each thread, or of each two: of logits as in keys
  uint64_t sorted[kThreads < kMaxK ? kThreads : kMaxK];  // rows with a larger k have more threads
  int waiting[kMaxWaiting];  // groups of threads that may hold candidates
  uint64_t threshold;
  uint32_t reached[2];  // by k logits of the block, and of the cluster
  uint64_t shared;      // a barrier: what other blocks of the cluster share
  int count;            // of candidates, those that found no place too
  int waiting_count;

  // The keys key(i) whose bits are set in `wanted`.
  template <class Key>
  __device__ void append(unsigned wanted, Key&& key) {
    if (wanted == 0) return;
    int at = atomicAdd(&count, __popc(wanted));
#pragma unroll 1
    for (; wanted != 0 && at < kMaxCandidates; wanted &= wanted - 1, ++at)
      candidates[at] = key(__ffs(wanted) - 1);
  }

  // Leaves the k best among the candidates. There is none yet. At least k keys reach
  // `least`; collect(least) appends every key from there on.
  template <class Collect>
  __device__ void select(int k, uint64_t least, Collect&& collect) {
    for (;;) {
      collect(least);
      __syncthreads();
      const int found = count;
      if (found <= kMaxCandidates) {
        if (found > 2 * k + kFewCandidates) drop_hopeless(found, k);
        return;
      }
      __syncthreads();  // all have read it
      least = find_threshold(kMaxCandidates, k);
    }
  }

  // The larger of two delegates comes first. Of two threads the two largest stay.
  __device__ void put_delegates(uint32_t (&two)[2]) {
    constexpr int kTogether = kThreads / kDelegates;
    static_assert(kTogether <= 2);
    const int thread = thread_index_anew();
    if constexpr (kTogether == 2) {
      const uint32_t first = __shfl_xor_sync(~0u, two[0], 1),
                     second = __shfl_xor_sync(~0u, two[1], 1);
      two[1] = max(min(two[0], first), max(two[1], second));
      two[0] = max(two[0], first);
    }
    delegates[0][thread / kTogether] = two[0];
    delegates[1][thread / kTogether] = two[1];
  }
  // What at least k delegates reach, 0 where there are fewer: by one warp. Behind a barrier.
  __device__ uint32_t least_of_delegates(int k) const {
    const int lane = thread_index_anew() % 32;
    constexpr int kOfLane = kDelegates / 32;
    uint32_t values[2 * kOfLane];
#pragma unroll
    for (int i = 0; i < 2 * kOfLane; ++i)
      values[i] = delegates[i / kOfLane][i % kOfLane * 32 + lane];
    return threshold_of<kOfLane>(values, k, most_reaching(k));
  }

  // A threshold of a whole cluster: all blocks get the largest delegate of every eight threads.
  // In the place of the sorted keys.
  static constexpr int bytes_of_cluster(int blocks) { return blocks * kWarps * 16; }
  __device__ void share_with_cluster(uint32_t largest, int rank, int blocks) {
    static_assert(bytes_of_cluster(kMaxCluster) <= sizeof(sorted));
    const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
      largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
    const uint32_t low = __shfl_sync(~0u, largest, lane % 2 * 16),
                   high = __shfl_sync(~0u, largest, lane % 2 * 16 + 8);
    if (lane < 2 * blocks)
      send_to_cluster(sorted + (rank * kWarps + warp) * 2 + lane % 2, &shared, lane / 2,
                      uint64_t{high} << 32 | low);
  }
  // Waits for them; by one warp.
  __device__ uint32_t least_of_cluster(int k, int blocks) {
    const auto* const largest = reinterpret_cast<const uint32_t*>(sorted);
    wait_for_bytes(&shared, 0);
    const int lane = thread_index_anew() % 32;
    uint32_t values[kMaxCluster * kWarps * 4 / 32];
#pragma unroll
    for (int i = 0; i < kMaxCluster * kWarps * 4 / 32; ++i)
      values[i] = i * 32 + lane < 4 * kWarps * blocks ? largest[i * 32 + lane] : 0;
    return threshold_of(values, k, most_reaching(k));
  }

  // By a warp, before a barrier.
  __device__ void put_threshold(int place, uint32_t found) {
    if (thread_index_anew() % 32 == 0) reached[place] = found;
  }

  // Calls body(rank, key) for the k best, in several threads. Where a block has several warps some
  // lanes count together.
  template <class Body>
  __device__ void for_ranked(int k, Body&& body) const {
    constexpr int kLanes = kWarps > 1 ? 4 : 1;
    const int thread = thread_index_anew(), lane = thread % kLanes;
    const int first = thread / 32 * (32 / kLanes);  // of the warp
#pragma unroll 1
    for (int begin = first; begin < count; begin += kThreads / kLanes) {
      const int i = begin + thread % 32 / kLanes;
      const uint64_t mine = i < count ? candidates[i] : kNoKey;
      int rank = 0;
#pragma unroll 4
      for (int j = lane; j < count; j += kLanes) rank += candidates[j] > mine;
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2)
        rank += __shfl_xor_sync(~0u, rank, distance);
      if (lane == 0 && rank < k && mine != kNoKey) body(rank, mine);
    }
  }

 private:
  // A number that k of the candidates certainly reach. They are forgotten. Rare enough for its code
  // to stand in one place.
  __device__ __noinline__ uint64_t find_threshold(int candidate_count, int k) {
    if (threadIdx.x < 32) {
      const uint64_t found =
          candidate_count <= 4 * 32   ? threshold_of_keys<4>(candidates, candidate_count, k)
          : candidate_count <= 8 * 32 ? threshold_of_keys<8>(candidates, candidate_count, k)
                                      : threshold_of_keys<16>(candidates, candidate_count, k);
      __syncwarp();
      if (threadIdx.x == 0) {
        threshold = found;
        count = waiting_count = 0;
      }
    }
    __syncthreads();
    return threshold;
  }

  // Ranking takes the square of the number of candidates.
  __device__ void drop_hopeless(int candidate_count, int k) {
    __syncthreads();  // all have read the count
    const uint64_t least = find_threshold(candidate_count, k);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kMaxCandidates; i += kThreads) {
      const uint64_t key = i < candidate_count ? candidates[i] : kNoKey;
      __syncthreads();  // what is appended takes the place of what has been read
      append(key != kNoKey && key >= least, [&](int) { return key; });
    }
    __syncthreads();
  }
};

}  // namespace megasoftmax
