#pragma once
// A softcap in attention: scores are tanh of products of queries and keys. Hopper's kernels have
// instances for it, and portable ones have it in the instances that are not unmasked.

#include "../common/softcap.cuh"
#include "fragments.cuh"
#include "params.h"

namespace megasoftmax {

// Makes scores of products, by all lanes of a warp.
template <class T, int kM, int kN>
__device__ __forceinline__ void cap_products(const AttentionParams& params,
                                             Accumulators<kM, kN>& products) {
  cap_scores<T, true>(reinterpret_cast<float (&)[kM * kN * 4]>(products), params.softcap);
}

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
