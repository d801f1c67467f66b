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

// Whether tanh may be a polynomial of products: coefficients are normal numbers, and logits err by
// about as much as rounding changes weights, or less.
template <class T>
__device__ __forceinline__ bool takes_small_tanh(const Softcap& softcap) {
  constexpr float kMostCapOfBfloat16 = 128.f;
  const float inner = fabsf(softcap.inner);
  return softcap.cap >= 1.f && inner >= 1e-5f && inner <= 1000.f &&
         (std::is_same_v<T, __half> || softcap.cap <= kMostCapOfBfloat16);
}
// The terms of that polynomial where |v|, see common/softcap.cuh, is below kReach. For bfloat16 a
// logit errs by 2.3e-5 of itself with three terms, and by 6.4e-5 with two, which forward takes: by
// 8e-4 at most, if the softcap is 50. Rounding changes a weight by up to 2e-3.
template <class T, int kReach = 2>
inline constexpr int kTermsOfTanh = (std::is_same_v<T, __nv_bfloat16> ? 1 : 2) + kReach;

// Exponents of OnlineSoftmax::try_weights, of products that a softcap caps. They are wrong if some
// products are large: if |v| is not below kReach.
template <class T, int kReach>
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
    return !(__uint_as_float(largest_) * fourfold_ * fourfold_ < kReach * kReach);
  }

 private:
  float fourfold_;
  SmallTanh<kTermsOfTanh<T, kReach>, kReach> tanh_;
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
    for (int i = 0; i < kPairs; ++i) {
      const float* const pair = scores[i / 2 / kN][i / 2 % kN] + i % 2 * 2;
      pairs_[i] = round_pair<Kept>(slope_of_tanh(pair[0]), slope_of_tanh(pair[1]));
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
};

}  // namespace megasoftmax
