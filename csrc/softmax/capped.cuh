#pragma once
// Logits of rows that a softcap alone bends: no mask, bias or dropout. They are in units of exp2,
// softcap * log2(e) * tanh, so that the exponent of a probability takes one addition.
//
// A vector whose scaled scores all lie below half of the softcap takes the polynomial of
// common/softcap.cuh, about 8 instructions a score. Another vector of 16 bits takes
// 1 - 2 / (1 + e^(v/2)), with one reciprocal for four scores: the unit of special functions would
// be slower than memory with one for each. That errs by less than 3e-7 of the softcap. The scores
// of a vector alone decide, so a row has the same bits in all kernels. float32 decides score by
// score, as in common/softcap.cuh.

#include "../common/halves.cuh"
#include "../common/softcap.cuh"
#include "../common/vector.cuh"

namespace megasoftmax {

inline constexpr float kLargestFinite = 0x1p63f;

template <class T>
class CappedLogits {
 public:
  // has_signs: the signs of the scores are turned where the scale is negative.
  __device__ CappedLogits(const Softcap& softcap, bool has_signs)
      : fourfold_(4.f * (has_signs ? fabsf(softcap.inner) : softcap.inner)),
        most_(softcap.cap * kLog2E),
        small_(softcap.cap * kLog2E) {}
  __device__ explicit CappedLogits(const LogitOptions& options)
      : CappedLogits(options.softcap, true) {}

  // Whether the polynomial serves scores of this magnitude.
  __device__ bool are_small(float magnitude) const { return fabsf(magnitude * fourfold_) < 2.f; }

  // kMayExclude: -inf is excluded, and stays -inf. Other large scores went through make_finite.
  template <bool kMayExclude, int kElements>
  __device__ __forceinline__ void of(const Pack<T, kElements>& scores,
                                     float (&z)[kElements]) const {
    AnyFrom2 large;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      z[j] = scores[j] * fourfold_;
      large.add(z[j]);
    }
    if (large.is_there()) {
      of_large<kMayExclude>(z);
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[j] = of_polynomial(z[j]);
    }
  }
  // Of scores that are certainly small.
  template <int kElements>
  __device__ __forceinline__ void of_small(const Pack<T, kElements>& scores,
                                           float (&z)[kElements]) const {
#pragma unroll
    for (int j = 0; j < kElements; ++j) z[j] = of_polynomial(scores[j] * fourfold_);
  }
  __device__ __forceinline__ float of_small(float score) const {
    return of_polynomial(score * fourfold_);
  }
  // Those plus a number.
  template <int kElements>
  __device__ __forceinline__ void exponents_of_small(const Pack<T, kElements>& scores, float added,
                                                     float (&z)[kElements]) const {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const float v = scores[j] * fourfold_;
      z[j] = fmaf(v, small_.over(v), added);
    }
  }
  // Of one score; at least kLowest.
  __device__ __forceinline__ float of_largest(float score) const {
    return score == -INFINITY ? kLowest : of_single(score);
  }
  // Of one score that is not excluded.
  __device__ __forceinline__ float of_single(float score) const {
    const float v = score * fourfold_;
    return fabsf(v) < 2.f ? of_polynomial(v) : of_alone(v);
  }
  // What makes tanh of a logit. The largest one becomes no less than 1, whose slope is exactly 0.
  __device__ float to_tanh() const { return __uint_as_float(__float_as_uint(1.f / most_) + 1); }

 private:
  // Rounded, whatever is added to it: some kernels keep it and others do not.
  __device__ __forceinline__ float of_polynomial(float v) const {
    return __fmul_rn(v, small_.over(v));
  }
  // 1 + e^|v/2|. Four of them have a finite product.
  __device__ static __forceinline__ float denominator(float v) {
    return 1.f + exp2_approximate(fminf(fabsf(v) * (kLog2E / 2), 31.f));
  }
  __device__ __forceinline__ float of_part(float v, float part) const {
    return copysignf(fmaf(part, -2.f * most_, most_), v);
  }
  __device__ __forceinline__ float of_alone(float v) const {
    const float z = of_part(v, reciprocal_approximate(denominator(v)));
    return v == v ? z : v;
  }

  template <bool kMayExclude, int kElements>
  __device__ __forceinline__ void of_large(float (&z)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      float v[4], d[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Hidden: what both ways have in common would be computed before the branch.
        v[j] = __uint_as_float(unknown(__float_as_uint(z[i + j])));
        d[j] = denominator(v[j]);
      }
      float parts[4];
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) parts[j] = reciprocal_approximate(d[j]);
      } else {
        const float first = d[0] * d[1], second = d[2] * d[3];
        const float all = reciprocal_approximate(first * second);
        const float of_first = all * second, of_second = all * first;
        parts[0] = of_first * d[1];
        parts[1] = of_first * d[0];
        parts[2] = of_second * d[3];
        parts[3] = of_second * d[2];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float large = of_part(v[j], parts[j]);
        if constexpr (kMayExclude) {
          large = fmaf(v[j], 1.4e-45f, large);  // NaN and -inf add themselves, others nothing
        } else {
          large = v[j] == v[j] ? large : v[j];
        }
        z[i + j] = sizeof(T) == 4 && fabsf(v[j]) < 2.f ? of_polynomial(v[j]) : large;
      }
    }
  }

  float fourfold_, most_;
  SmallTanh<sizeof(T) == 4 ? 5 : 4> small_;
};

// The largest magnitude of all lanes, two lanes to an operation where they are halves; not NaN
// unless all are.
template <class T, int kElements, int kPacks>
__device__ inline float largest_magnitude(const Pack<T, kElements> (&packs)[kPacks]) {
  constexpr uint32_t kMagnitude = sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu;
  Pack<T, kElements> magnitudes[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
#pragma unroll
    for (int word = 0; word < packs[i].kWords; ++word)
      magnitudes[i].words[word] = packs[i].words[word] & kMagnitude;
  }
  return largest_lane(magnitudes);
}

// Scores beyond +-kLargestFinite, infinite ones too, become that, which the softcap bounds alike
// (has_moderate_cap in params.h). So -inf can mean excluded. NaN stays.
template <class T, int kElements>
__device__ inline void make_finite(Pack<T, kElements>& scores) {
#pragma unroll
  for (uint32_t& word : scores.words) {
    if constexpr (sizeof(T) == 4) {
      const float x = __uint_as_float(word);
      if (fabsf(x) > kLargestFinite) word = __float_as_uint(copysignf(kLargestFinite, x));
    } else {
      word = Halves<T>::made_finite(word);
    }
  }
}

}  // namespace megasoftmax
