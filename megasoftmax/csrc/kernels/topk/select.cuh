#pragma once
// The k best of many keys, by a block: collect what reaches a threshold that k of them certainly
// reach, then rank it. Where too much reaches it, as in a row of one value, a threshold of what was
// collected is one that less reaches.

#include "keys.cuh"
#include "limits.h"

namespace megasoftmax {

template <int kThreads>
struct Selection {
  // Two for each thread.
  static constexpr int kMaxDelegates = 2 * kThreads;
  static_assert(kMaxDelegates <= kMaxCandidates);
  // Groups of threads that may hold candidates, for each warp. Once kFlush wait it looks at them.
  static constexpr int kWarps = kThreads / 32, kFlush = 32;
  static constexpr int kFewCandidates = 64;  // to be ranked as they are

  uint64_t candidates[kMaxCandidates];
  uint64_t delegates[kMaxDelegates];
  uint64_t sorted[kMaxK];
  int waiting[kWarps][2 * kFlush];
  uint32_t least_of_warps[kWarps], least_of_whole_warps[kWarps];
  uint64_t threshold;
  int count;  // of candidates, those that found no place too

  // The keys key(i) whose bits are set in `wanted`.
  template <class Key>
  __device__ void append(unsigned wanted, Key&& key) {
    if (wanted == 0) return;
    int at = atomicAdd(&count, __popc(wanted));
#pragma unroll 1
    for (; wanted != 0 && at < kMaxCandidates; wanted &= wanted - 1, ++at)
      candidates[at] = key(__ffs(wanted) - 1);
  }
  // By a whole warp: the same answer for all lanes.
  __device__ bool is_full() {
    const int appended = threadIdx.x % 32 == 0 ? atomicAdd(&count, 0) : 0;
    return __shfl_sync(~0u, appended, 0) > kMaxCandidates;
  }

  // Leaves the k best among the candidates, of which there is none yet. At least k keys reach
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
      least = find_threshold(candidates, kMaxCandidates, k);
    }
  }

  // A number that k of the keys certainly reach, kNoKey where there are fewer. The keys, behind a
  // barrier, are distinct, or lower than distinct ones. Candidates are forgotten. Rare enough for
  // its code to stand in one place.
  __device__ __noinline__ uint64_t find_threshold(const uint64_t* keys, int key_count, int k) {
    if (threadIdx.x < 32) {
      // A few candidates too many cost less than a threshold that leaves just k.
      const int most = k + k / 2 + 4;
      uint64_t found = kNoKey;
      if (key_count >= k) {
        found = key_count <= 4 * 32   ? threshold_of_keys<4>(keys, key_count, k, most)
                : key_count <= 8 * 32 ? threshold_of_keys<8>(keys, key_count, k, most)
                                      : threshold_of_keys<16>(keys, key_count, k, most);
      }
      __syncwarp();
      if (threadIdx.x == 0) {
        threshold = found;
        count = 0;
      }
    }
    __syncthreads();
    return threshold;
  }

  // The same of one number for each thread, as long as k is a small part of them: as many of each
  // warp's as make k together, or all of one warp. Of keys, the part above the column.
  __device__ void offer(uint32_t mine, int k) {
    const uint32_t least_of_all = k <= 32 ? smallest_of_lanes(mine) : 0;
    uint32_t least = 0;
#pragma unroll 1
    for (int left = (k + kWarps - 1) / kWarps; left > 0;) {
      least = largest_of_lanes(mine);
      left -= __popc(__ballot_sync(~0u, mine == least));
      if (mine == least) mine = 0;
    }
    if (threadIdx.x % 32 == 0) {
      least_of_warps[threadIdx.x / 32] = least;
      least_of_whole_warps[threadIdx.x / 32] = least_of_all;
    }
    if (threadIdx.x == 0) count = 0;
  }
  // Behind a barrier.
  __device__ uint64_t least_offered() const {
    const int warp = thread_index_anew() % kWarps;
    return uint64_t{max(smallest_of_lanes(least_of_warps[warp]),
                        largest_of_lanes(least_of_whole_warps[warp]))}
           << 32;
  }

  // Calls body(rank, key) for the k best, in several threads.
  template <class Body>
  __device__ void for_ranked(int k, Body&& body) const {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const uint64_t mine = candidates[i];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) rank += candidates[j] > mine;
      if (rank < k && mine != kNoKey) body(rank, mine);
    }
  }

 private:
  // Ranking takes the square of the number of candidates.
  __device__ void drop_hopeless(int candidate_count, int k) {
    __syncthreads();  // all have read the count
    const uint64_t least = find_threshold(candidates, candidate_count, k);
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
