#pragma once
// Which of the k entries of a row keep their probability, and which of them is drawn: what a
// sampler does with a softmax. A warp finds both from the weights exp(z - max z) of the entries, in
// order.

#include "../common/dropout.cuh"
#include "../common/reduce.cuh"
#include "keys.cuh"
#include "row.cuh"

namespace megasoftmax {

// The sum of a number of each lane and of those below it.
__device__ inline float sum_up_to_lane(float number, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float below = __shfl_up_sync(~0u, number, distance);
    if (lane >= distance) number += below;
  }
  return number;
}

struct WithinLimits {
  int count;  // the first so many
  float sum;  // of their weights
};

// By each warp that asks. `sum`: that of the weights of the whole row.
template <class Weight>
__device__ WithinLimits find_within(int top_k, float top_p, float min_p, int k, float sum,
                                    Weight&& weight) {
  const int lane = thread_index_anew() % 32;
  const bool has_top_k = top_k >= 1 && top_k <= k;
  const int most = has_top_k ? top_k : k;
  if (has_top_k) {
    sum = 0.f;
    for (int i = lane; i < most; i += 32) sum += weight(i);
    sum = warp_sum<32>(sum);
  }
  const float nucleus = top_p >= 1.f ? INFINITY : top_p * sum;
  float before = 0.f;  // the sum of the groups of 32 before this one
#pragma unroll 1
  for (int first = 0;; first += 32) {
    const int i = first + lane;
    const float mine = i < most ? weight(i) : 0.f;
    const float through = sum_up_to_lane(mine, lane);
    const float below = __shfl_up_sync(~0u, through, 1);
    const float preceding = before + (lane == 0 ? 0.f : below);
    const bool is_kept = i < most && (i == 0 || (preceding < nucleus && mine >= min_p));
    const int count = __ffs(~__ballot_sync(~0u, is_kept)) - 1;  // -1: all 32
    const int last = count < 0 ? 31 : count - 1;
    const float up_to_last = __shfl_sync(~0u, through, max(last, 0));
    if (count == 0) return {first, before};
    before += up_to_last;
    if (count > 0 || first + 32 >= most) return {first + last + 1, before};
  }
}

// The first of `kept` entries up to which the weights sum to more than a number, or the last with a
// weight: rounding may leave a sum below the number.
template <class Weight>
__device__ int find_drawn(int kept, float number, Weight&& weight) {
  const int lane = thread_index_anew() % 32;
  float before = 0.f;
  int last = 0;
#pragma unroll 1
  for (int first = 0; first < kept; first += 32) {
    const int i = first + lane;
    const float mine = i < kept ? weight(i) : 0.f;
    const float through = before + sum_up_to_lane(mine, lane);
    const unsigned reached = __ballot_sync(~0u, mine > 0.f && through > number);
    if (reached != 0) return first + __ffs(reached) - 1;
    before = __shfl_sync(~0u, through, 31);
    const unsigned weighed = __ballot_sync(~0u, mine > 0.f);
    if (weighed != 0) last = first + 31 - __clz(weighed);
  }
  return last;
}

// From 0 to 1 exclusively; `uniform` of megasoftmax/reference/topk.py. Dropout's counters end with
// less than 64.
__device__ inline float random_number(int64_t seed, int64_t row) {
  const auto number = static_cast<uint64_t>(row);
  const RandomWords random(static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), 0,
                           64, static_cast<uint64_t>(seed));
  return static_cast<float>(random.words[0] >> 8) * 0x1p-24f;
}

// By all warps of a block, of the keys of a row in order. The first warp draws. A function of its
// own, not to take registers of rows without limits.
__device__ __noinline__ inline WithinLimits limit_row(const TopkForwardParams& params,
                                                      const TopkSchedule& schedule, int64_t row,
                                                      MaxAndSum total, Exponent exponent,
                                                      const uint64_t* sorted) {
  const TopkLimits& limits = params.limits;
  const RowIndex index = row_at(schedule, row);
  const auto read = [&](const auto& of_rows, auto number) {
    return of_rows.data == nullptr ? number : of_rows.at(index.batch, index.head, index.query);
  };
  const auto weight = [&](int i) { return exponent(logit_of(sorted[i]), total.max); };
  WithinLimits found{params.k, total.sum};
  const bool is_regular = total.sum > 0.f;  // neither empty nor NaN
  if (is_regular)
    found = find_within(read(limits.row_top_k, limits.top_k), read(limits.row_top_p, limits.top_p),
                        read(limits.row_min_p, limits.min_p), params.k, total.sum, weight);
  if (params.drawn != nullptr && threadIdx.x < 32) {
    int drawn = 0;
    if (is_regular)
      drawn = find_drawn(found.count, found.sum * random_number(*params.seed, row), weight);
    if (threadIdx.x == 0) params.drawn[row] = column_of(sorted[drawn]);
  }
  return found;
}

}  // namespace megasoftmax
