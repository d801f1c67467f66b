#pragma once
// A softcap: tanh of scores. It is made from v = 4 * score * scale / softcap, element by element.
//
// Where |v| < 2, a capped logit below 46% of the softcap, it is an odd polynomial of v. That leaves
// the unit of special functions to the exponentials of the softmax, which keep it busy. Elsewhere
// it is 1 - 2 / (1 + e^(v/2)), two more of these functions. The relative error, against float64, is
// 5e-7 for float32 and 7e-7 for 16 bits: 3.5e-5 in a logit of a softcap of 50. tanh.approx errs
// by 2^-11, which is 0.024 there, and weights of bfloat16 have a rounding error of 0.004.

#include "math.cuh"
#include "tensors.h"

namespace megasoftmax {

// tanh(v / 4) = v p(v^2) where |v| < kReach, times a factor. Coefficients of p have the least
// relative error. `inner`: they take what makes v of a score, so that it is a function of scores.
template <int kTerms, int kReach = 2>
class SmallTanh {
 public:
  __device__ __forceinline__ explicit SmallTanh(float factor = 1.f, float inner = 1.f) {
    static_assert(kReach == 1 ? kTerms == 2 || kTerms == 3 : kTerms >= 3 && kTerms <= 5);
    static_assert(kReach <= 2);
    // Errors in float32: 6.4e-5 and 4.3e-7 up to 1; 2.3e-5, 6.3e-7 and 1.2e-7 up to 2.
    constexpr float kCoefficients[][5] = {
        {2.499841618e-01f, -5.081015680e-03f},
        {2.499999011e-01f, -5.206548160e-03f, 1.254063812e-04f},
        {2.499943589e-01f, -5.182679810e-03f, 1.125095357e-04f},
        {2.499998639e-01f, -5.207237173e-03f, 1.288114863e-04f, -2.710096086e-06f},
        {2.499999967e-01f, -5.208292093e-03f, 1.301247988e-04f, -3.234013728e-06f,
         6.536490740e-08f}};
    constexpr int kRow = kTerms + kReach - 3;
    factor *= inner;
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      coefficients_[i] = kCoefficients[kRow][i] * factor;
      factor *= inner * inner;
    }
  }
  // Without the last factor v.
  __device__ __forceinline__ float over(float v) const {
    const float square = v * v;
    float sum = coefficients_[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, coefficients_[i]);
    return sum;
  }
  __device__ __forceinline__ float of(float v) const { return v * over(v); }

 private:
  float coefficients_[kTerms];
};

// Whether magnitudes of some values are 2 or more, or a value is NaN.
struct AnyFrom2 {
  uint32_t bits = 0;

  __device__ __forceinline__ void add(float v) { bits |= __float_as_uint(v); }
  // The bit that exponents from 2 on have.
  __device__ __forceinline__ bool is_there() const { return (bits & 0x40000000) != 0; }
};

// Calls use(i, tanh) for each score, which it may change. kIsWarp: all lanes of the warp call it,
// and go the same way. Returns whether some were too large for the polynomial.
template <class T, bool kIsWarp, int kCount, class Use>
__device__ __forceinline__ bool for_each_tanh(float (&scores)[kCount], const Softcap& softcap,
                                              Use&& use) {
  const float fourfold = 4.f * softcap.inner;
  AnyFrom2 large;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] *= fourfold;
    large.add(scores[i]);
  }
  const SmallTanh<sizeof(T) == 4 ? 5 : 4> small;
  const bool are_large = kIsWarp ? __any_sync(~0u, large.is_there()) : large.is_there();
  if (!are_large) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(i, small.of(scores[i]));
    return false;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // Hidden: the compiler would compute what both ways have in common before the branch, and keep
    // it beside the scores.
    const float v = __uint_as_float(unknown(__float_as_uint(scores[i])));
    const float part = reciprocal_approximate(1.f + exp2_approximate(v * (kLog2E / 2)));
    use(i, fabsf(v) < 2.f ? small.of(v) : fmaf(-2.f, part, 1.f));
  }
  return true;
}

// Replaces scores by their tanh.
template <class T, bool kIsWarp, int kCount>
__device__ __forceinline__ bool cap_scores(float (&scores)[kCount], const Softcap& softcap) {
  return for_each_tanh<T, kIsWarp>(scores, softcap, [&](int i, float t) { scores[i] = t; });
}

// What a softcap multiplies the gradient of a score by, from its tanh; 0 for NaN.
__device__ __forceinline__ float slope_of_tanh(float t) { return fmaxf(fmaf(-t, t, 1.f), 0.f); }

}  // namespace megasoftmax
