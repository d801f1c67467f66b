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

// The weights of the first entries of a row, in order, by a warp: entry 64 g + 2 lane and the next
// one are the pair that a lane has of group g.
class OrderedWeights {
  static constexpr int kGroup = 64, kGroups = kMaxK / kGroup;
  float weights_[kGroups][2];
  float before_[kGroups], up_to_[kGroups];  // sums of the entries before a pair, and up to its end
  int lane_;

 public:
  float sum = 0.f;

  template <class Weight>
  __device__ __forceinline__ OrderedWeights(int count, Weight&& weight)
      : lane_(thread_index_anew() % 32) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      weights_[group][0] = weights_[group][1] = before_[group] = up_to_[group] = 0.f;
      if (group * kGroup >= count) continue;
      const int first = group * kGroup + 2 * lane_;
      if (first < count) weights_[group][0] = weight(first);
      if (first + 1 < count) weights_[group][1] = weight(first + 1);
      const float up_to_lane = sum_up_to_lane(weights_[group][0] + weights_[group][1], lane_);
      const float below = __shfl_up_sync(~0u, up_to_lane, 1);
      before_[group] = lane_ == 0 ? sum : sum + below;
      up_to_[group] = sum + up_to_lane;
      sum += __shfl_sync(~0u, up_to_lane, 31);
    }
  }

  // How many of the first `count` entries come before the first one for which holds(entry, its
  // weight, the sum before it, the sum up to it) is false.
  template <class Holds>
  __device__ __forceinline__ int count_while(int count, Holds&& holds) const {
    int found = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (found != group * kGroup || found >= count) continue;
      const int first = group * kGroup + 2 * lane_;
      const float middle = before_[group] + weights_[group][0];
      const unsigned of_first = __ballot_sync(
          ~0u, first < count && holds(first, weights_[group][0], before_[group], middle));
      const unsigned of_second = __ballot_sync(
          ~0u, first + 1 < count && holds(first + 1, weights_[group][1], middle, up_to_[group]));
      found += min(2 * lanes_before_zero(of_first), 2 * lanes_before_zero(of_second) + 1);
    }
    return found;
  }

  // Of the first `count` entries, which is from 1 on.
  __device__ __forceinline__ float sum_of(int count) const {
    const int last = count - 1;
    float found = 0.f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int first = group * kGroup + 2 * lane_;
      if (first == last) found = before_[group] + weights_[group][0];
      if (first + 1 == last) found = up_to_[group];
    }
    return __shfl_sync(~0u, found, last % kGroup / 2);
  }

 private:
  __device__ static int lanes_before_zero(unsigned bits) {
    return bits == ~0u ? 32 : __ffs(~bits) - 1;
  }
};

struct WithinLimits {
  int count;  // the first so many
  float sum;  // of their weights
};

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
__device__ __noinline__ inline WithinLimits limit_row(const TopkForwardParams& params, int64_t row,
                                                      MaxAndSum total, Exponent exponent,
                                                      const uint64_t* sorted) {
  const TopkLimits& limits = params.limits;
  const bool draws = params.drawn != nullptr && threadIdx.x < 32;
  const int64_t seed = draws ? *params.seed : 0;
  const auto read = [&](const auto& of_rows, auto number) {
    return of_rows.data == nullptr ? number : of_rows.at(row);
  };
  const int top_k = read(limits.row_top_k, limits.top_k);
  const float top_p = read(limits.row_top_p, limits.top_p),
              min_p = read(limits.row_min_p, limits.min_p);
  if (!(total.sum > 0.f) || params.k == 0) {  // empty, or NaN
    if (draws && threadIdx.x == 0) params.drawn[row] = column_of(sorted[0]);
    return {params.k, total.sum};
  }
  const bool has_top_k = top_k >= 1 && top_k <= params.k;
  const int most = has_top_k ? top_k : params.k;
  const OrderedWeights weights(most,
                               [&](int i) { return exponent(logit_of(sorted[i]), total.max); });
  const float whole = has_top_k ? weights.sum : total.sum;
  const float nucleus = top_p >= 1.f ? INFINITY : top_p * whole;
  const int count = weights.count_while(most, [&](int i, float weight, float before, float) {
    return i == 0 || (before < nucleus && weight >= min_p);
  });
  const float sum = weights.sum_of(count);
  if (draws) {
    const float number = sum * random_number(seed, row);
    int drawn = weights.count_while(count, [&](int, float weight, float, float up_to) {
      return !(weight > 0.f && up_to > number);
    });
    if (drawn == count)  // rounding left all sums below the number
      drawn = weights.count_while(count, [](int, float weight, float, float) {
        return weight > 0.f;
      }) - 1;
    if (threadIdx.x == 0) params.drawn[row] = column_of(sorted[drawn]);
  }
  return {count, sum};
}

}  // namespace megasoftmax
