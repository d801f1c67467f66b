#pragma once
// Weights of Hopper's backward with a softcap. They are rounded for dV, and then multiplied by the
// slope of tanh, a factor of the gradients of scores. Apart it would take registers.

#include "../../softcap.cuh"

namespace megasoftmax {

// Turns products into weights times slopes, and rounds the weights to factors of a product.
// offset_of(column) returns the offset of a query, see PairOfRows.
template <class T, int kN, class OffsetOf>
__device__ __forceinline__ void weigh_capped(const AttentionParams& params,
                                             float (&products)[kN][4],
                                             uint32_t (&rounded)[kN / 2][4], OffsetOf&& offset_of) {
  const Softcap& softcap = params.softcap;
  const float logit_of_tanh = softcap.cap * kLog2E, fourfold = 4.f * softcap.inner;
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * kN; ++i) largest = fmaxf(largest, fabsf(products[i / 4][i % 4]));
  float taken[2];    // of the two queries of a pair
  float even = 0.f;  // the first weight of the pair
  const auto weigh = [&](int i, float tanh, float slope) {
    const int n = i / 4, right = i % 2;
    if (i % 4 < 2) taken[right] = offset_of(2 * n + right);
    const float weight = exp2_approximate(fmaf(tanh, logit_of_tanh, -taken[right]));
    products[n][i % 4] = weight * slope;
    if (right == 0) {
      even = weight;
    } else {
      rounded[n / 2][n % 2 * 2 + i % 4 / 2] = round_pair<T>(even, weight);
    }
  };
  // fmaxf ignores NaN, and the polynomial keeps it.
  if (takes_small_tanh<T>(softcap) && !__any_sync(~0u, largest * fabsf(fourfold) >= 2.f)) {
    const SmallTanh<kTermsOfTanh<T>> small(1.f, fourfold);
#pragma unroll
    for (int i = 0; i < 4 * kN; ++i) {
      const float tanh = small.of(products[i / 4][i % 4]);
      weigh(i, tanh, fmaf(-tanh, tanh, 1.f));
    }
  } else {
    for_each_tanh<T, true>(reinterpret_cast<float (&)[4 * kN]>(products), softcap,
                           [&](int i, float tanh) { weigh(i, tanh, slope_of_tanh(tanh)); });
  }
}

// Clears rounded weights that dropout drops: those of negative weights. -0 is negative, NaN is not.
template <int kN>
__device__ __forceinline__ void clear_dropped(uint32_t (&rounded)[kN / 2][4],
                                              const float (&weights)[kN][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kN; ++i) {
    const float* const pair = weights[i / 2] + i % 2 * 2;
    rounded[i / 4][i % 4] &= ~halves_of_signs(__float_as_uint(pair[0]), __float_as_uint(pair[1]));
  }
}

}  // namespace megasoftmax
