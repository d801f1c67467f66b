#pragma once
// A softcap: tanh of scores. It is made from v = 2 * score * scale / softcap, element by element,
// so that equal scores have equal results in every kernel.
//
// Where |v| < 2, a capped logit below 76% of the softcap, it is an odd polynomial of v. That leaves
// the unit of special functions to the exponentials of the softmax, which keep it busy. Elsewhere
// it is 1 - 2 / (1 + e^v), two more of these functions. The relative error, against float64, is
// 1.7e-7 for float32 and 7e-7 for 16 bits: 3.5e-5 in a logit of a softcap of 50. tanh.approx errs
// by 2^-11, which is 0.024 there, and weights of bfloat16 have a rounding error of 0.004.

#include "math.cuh"
#include "tensors.h"

namespace megasoftmax {

template <int kTerms>
__device__ __forceinline__ float odd_polynomial(float v, const float (&coefficients)[kTerms]) {
  const float square = v * v;
  float sum = coefficients[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, coefficients[i]);
  return v * sum;
}

// tanh(v / 2) where |v| < 2, with the least relative error of so many terms.
template <class T>
__device__ __forceinline__ float tanh_of_half(float v) {
  if constexpr (sizeof(T) == 4) {
    return odd_polynomial<7>(
        v, {4.999999702e-01f, -4.166604951e-02f, 4.164126236e-03f, -4.176330403e-04f,
            3.962886694e-05f, -3.028993206e-06f, 1.270779251e-07f});
  } else {
    return odd_polynomial<6>(v, {4.999997020e-01f, -4.166130349e-02f, 4.150447901e-03f,
                                 -4.031693097e-04f, 3.270139132e-05f, -1.497587618e-06f});
  }
}

// Replaces scores by their tanh. kIsWarp: all lanes of the warp call it, and go the same way.
template <class T, bool kIsWarp, int kCount>
__device__ __forceinline__ void cap_scores(float (&scores)[kCount], const Softcap& softcap) {
  constexpr uint32_t kFrom2 = 0x40000000;  // the bit that exponents from 2 on have, of NaN too
  const float twice = 2.f * softcap.inner;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] *= twice;
    bits |= __float_as_uint(scores[i]);
  }
  bool are_large = (bits & kFrom2) != 0;
  if constexpr (kIsWarp) are_large = __any_sync(~0u, are_large);
  if (!are_large) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = tanh_of_half<T>(scores[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // Hidden: the compiler would compute what both ways have in common before the branch, and keep
    // it beside the scores.
    const float v = __uint_as_float(unknown(__float_as_uint(scores[i])));
    const float part = reciprocal_approximate(1.f + exp2_approximate(v * kLog2E));
    scores[i] = fabsf(v) < 2.f ? tanh_of_half<T>(v) : fmaf(-2.f, part, 1.f);
  }
}

// What a softcap multiplies the gradient of a score by, from its tanh; 0 for NaN.
__device__ __forceinline__ float slope_of_tanh(float t) { return fmaxf(fmaf(-t, t, 1.f), 0.f); }

}  // namespace megasoftmax
