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
class CappedExponents {
 public:
  __device__ explicit CappedExponents(const Softcap& softcap)
      : fourfold_(4.f * softcap.inner), tanh_(softcap.cap * kLog2E, fourfold_) {}
  __device__ __forceinline__ float operator()(float product, float taken) {
    // Squares are compared as bits, because three integers have a maximum in one instruction.
    largest_ = max(largest_, __float_as_uint(product * product));
    return fmaf(product, tanh_.over(product), -taken);
  }
  __device__ __forceinline__ bool are_wrong() const {
    return !(__uint_as_float(largest_) * fourfold_ * fourfold_ < 4.f);
  }
  // Whether coefficients are normal numbers, and logits err by less than rounding changes weights.
  __device__ __forceinline__ static bool are_fine(const Softcap& softcap) {
    const float inner = fabsf(softcap.inner);
    return softcap.cap >= 1.f && inner >= 1e-5f && inner <= 1000.f &&
           (!kIsBfloat16 || softcap.cap <= kMostCapOfBfloat16);
  }

 private:
  static constexpr bool kIsBfloat16 = std::is_same_v<T, __nv_bfloat16>;
  static constexpr float kMostCapOfBfloat16 = 200.f;

  float fourfold_;
  SmallTanh<kIsBfloat16 ? 3 : 4> tanh_;
  uint32_t largest_ = 0;
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
