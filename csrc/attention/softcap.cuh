#pragma once
// A softcap in attention: scores are tanh of products of queries and keys. Hopper's kernels have
// instances for it, and portable ones have it in the instances that are not unmasked.

#include "../common/softcap.cuh"
#include "fragments.cuh"
#include "params.h"

namespace megasoftmax {

// Makes scores of products, by all lanes of a warp. Returns whether some are large, see
// for_each_tanh.
template <class T, int kM, int kN>
__device__ __forceinline__ bool cap_products(const AttentionParams& params,
                                             Accumulators<kM, kN>& products) {
  return cap_scores<T, true>(reinterpret_cast<float (&)[kM * kN * 4]>(products), params.softcap);
}

// Exponents of OnlineSoftmax::try_weights, of products that a softcap caps. They are wrong if some
// products are large. For bfloat16 a logit errs by 2.3e-5 of itself: by 5e-4 at most, if the
// softcap is 50. Rounding changes a weight by up to 2e-3.
template <class T>
struct CappedExponents {
  static constexpr float kMostCapOfBfloat16 = 200.f;

  float fourfold;
  SmallTanh<std::is_same_v<T, __nv_bfloat16> ? 3 : 4> tanh;
  AnyFrom2 large;

  __device__ explicit CappedExponents(const Softcap& softcap)
      : fourfold(4.f * softcap.inner), tanh(softcap.cap * kLog2E) {}
  __device__ __forceinline__ float operator()(float product, float taken) {
    const float v = product * fourfold;
    large.add(v);
    return fmaf(v, tanh.over(v), -taken);
  }
  __device__ __forceinline__ bool are_wrong() const { return large.is_there(); }
  // Whether logits err by less than rounding changes weights.
  __device__ __forceinline__ static bool are_fine(const Softcap& softcap) {
    return !std::is_same_v<T, __nv_bfloat16> || softcap.cap <= kMostCapOfBfloat16;
  }
};

// What gradients of logits are multiplied by to be those of products, but for the scale. It is kept
// while weights take the place of scores. For 16 bits it is rounded to float16, which errs by 2^-11
// of it, or by 2^-25.
template <class T, int kM, int kN>
class SlopesOfScores {
 public:
  __device__ __forceinline__ void take(const Accumulators<kM, kN>& scores) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) take(i, scores[i / 4 / kN][i / 4 % kN][i % 4]);
  }
  // Of the score of element i. Elements come in their order.
  __device__ __forceinline__ void take(int i, float score) {
    const float slope = slope_of_tanh(score);
    if (i % 2 == 0) {
      even_ = slope;
    } else {
      pairs_[i / 2] = round_pair<Kept>(even_, slope);
    }
  }
  __device__ __forceinline__ void apply(Accumulators<kM, kN>& gradients) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float* const pair = gradients[i / 2 / kN][i / 2 % kN] + i % 2 * 2;
      if constexpr (sizeof(T) == 2) {
        const Pack<Kept, 2> slopes{{pairs_[i]}};
        pair[0] *= slopes[0];
        pair[1] *= slopes[1];
      } else {
        pair[0] *= pairs_[i].x;
        pair[1] *= pairs_[i].y;
      }
    }
  }

 private:
  static constexpr int kPairs = kM * kN * 2;
  using Kept = std::conditional_t<sizeof(T) == 2, __half, float>;
  Pair<Kept> pairs_[kPairs];
  float even_;
};

}  // namespace megasoftmax
