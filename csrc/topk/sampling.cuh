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

// From 0 to 1 exclusively; `uniform` of megasoftmax/reference/topk.py. Dropout's counters end with
// less than 64.
__device__ inline float random_number(int64_t seed, int64_t row) {
  const auto number = static_cast<uint64_t>(row);
  const RandomWords random(static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), 0,
                           64, static_cast<uint64_t>(seed));
  return static_cast<float>(random.words[0] >> 8) * 0x1p-24f;
}

// What a row has of its own, read while its threshold is found.
struct NumbersOfRow {
  float unit;  // of logits, see unit_of
  int top_k;
  float top_p, min_p;
  float number;  // by which an index is drawn

  __device__ void read(const TopkForwardParams& params, int64_t row, float unit_of_row) {
    const TopkLimits& limits = params.limits;
    const auto of = [&](const auto& of_rows, auto number) {
      return of_rows.data == nullptr ? number : of_rows.at(row);
    };
    unit = unit_of_row;
    top_k = of(limits.row_top_k, limits.top_k);
    top_p = of(limits.row_top_p, limits.top_p);
    min_p = of(limits.row_min_p, limits.min_p);
    number = params.drawn == nullptr ? 0.f : random_number(*params.seed, row);
  }
};

struct WithinLimits {
  int count;  // the first so many
  float sum;  // of their weights
};

// By all warps of a block, of the k keys of a row in order. The first warp draws, unless there is
// no place for it. A function of its own, not to take registers of rows without limits. It takes no
// reference to a kernel's parameters, which would be copied to local memory.
__device__ __noinline__ inline WithinLimits limit_row(int k, int64_t* drawn_index,
                                                      const NumbersOfRow& numbers, MaxAndSum total,
                                                      const uint64_t* sorted) {
  const bool draws = drawn_index != nullptr && threadIdx.x < 32;
  const int top_k = numbers.top_k;
  const float top_p = numbers.top_p, min_p = numbers.min_p;
  const Exponent exponent{numbers.unit * kLog2E};
  if (!(total.sum > 0.f) || k == 0) {  // empty, or NaN
    if (draws && threadIdx.x == 0) *drawn_index = column_of(sorted[0]);
    return {k, total.sum};
  }
  const bool has_top_k = top_k >= 1 && top_k <= k;
  const int most = has_top_k ? top_k : k;
  const OrderedWeights weights(most,
                               [&](int i) { return exponent(logit_of(sorted[i]), total.max); });
  const float whole = has_top_k ? weights.sum : total.sum;
  const float nucleus = top_p >= 1.f ? INFINITY : top_p * whole;
  const int count = weights.count_while(most, [&](int i, float weight, float before, float) {
    return i == 0 || (before < nucleus && weight >= min_p);
  });
  const float sum = weights.sum_of(count);
  if (draws) {
    const float number = sum * numbers.number;
    int drawn = weights.count_while(count, [&](int, float weight, float, float up_to) {
      return !(weight > 0.f && up_to > number);
    });
    if (drawn == count)  // rounding left all sums below the number
      drawn = weights.count_while(count, [](int, float weight, float, float) {
        return weight > 0.f;
      }) - 1;
    if (threadIdx.x == 0) *drawn_index = column_of(sorted[drawn]);
  }
  return {count, sum};
}

}  // namespace megasoftmax
