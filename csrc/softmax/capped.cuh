#pragma once
// Logits of rows that a softcap alone bends: no mask, bias or dropout. They are in units of exp2,
// softcap * log2(e) * tanh.
//
// They are bounded. So exponentials of the softmax need no maximum (reference_of_bounded). One
// multiplication makes a probability of each, and rows in registers take exp2 once.
//
// A vector whose scaled scores all lie below half of the softcap takes the polynomial of
// common/softcap.cuh, 5 instructions a score. Another vector of 16 bits takes
// 1 - 2 / (1 + e^(v/2)), with one reciprocal for four scores: the unit of special functions would
// be slower than memory with one for each. That errs by less than 3e-7 of the softcap. The scores
// of a vector alone decide, so a row has the same bits in all kernels. float32 decides score by
// score, as in common/softcap.cuh.

#include "../common/halves.cuh"
#include "../common/softcap.cuh"
#include "../common/vector.cuh"

namespace megasoftmax {

inline constexpr float kLargestFinite = 0x1p63f;

// The largest magnitude of all lanes; not NaN unless all are. kButLowest: but those of -inf.
template <bool kButLowest = false, class T, int kElements, int kPacks>
__device__ inline float largest_magnitude(const Pack<T, kElements> (&packs)[kPacks]) {
  if constexpr (kButLowest) {
    Pack<T, kElements> others[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      others[i] = packs[i];
      others[i].clear_lowest();
    }
    return largest_magnitude(others);
  }
  return fmaxf(largest_lane(packs), -smallest_lane(packs));
}

// Rows in segments keep exponentials for the pass that writes, rounded to this type, if results
// have it too. They are rounded once more with the probabilities: each by 2^-9 at most.
template <class T, class Out = T>
inline constexpr bool kKeepsExponentials =
    std::is_same_v<T, __nv_bfloat16> && std::is_same_v<T, Out>;

// Probabilities of such exponentials.
template <class T, int kElements>
__device__ __forceinline__ Pack<T, kElements> probabilities_of(Pack<T, kElements> exponentials,
                                                               float factor) {
#pragma unroll
  for (uint32_t& word : exponentials.words) word = Halves<T>::times(word, factor);
  return exponentials;
}

template <class T>
class CappedLogits {
 public:
  // has_signs: the signs of the scores are turned where the scale is negative.
  __device__ CappedLogits(const Softcap& softcap, bool has_signs)
      : fourfold_(4.f * (has_signs ? fabsf(softcap.inner) : softcap.inner)),
        most_(softcap.cap * kLog2E),
        small_(most_, fourfold_) {}
  __device__ explicit CappedLogits(const LogitOptions& options)
      : CappedLogits(options.softcap, true) {}

  // Whether the polynomial serves scores of this magnitude.
  __device__ bool are_small(float magnitude) const { return fabsf(magnitude * fourfold_) < 2.f; }
  // Whether it serves all scores of this lane. kMayExclude: also those of -inf, of which it makes
  // -inf.
  template <bool kMayExclude, int kElements, int kPacks>
  __device__ __forceinline__ bool are_small(const Pack<T, kElements> (&scores)[kPacks]) const {
    return are_small(largest_magnitude(scores)) ||
           (kMayExclude && are_small(largest_magnitude<true>(scores)));
  }

  // Logits plus a number. kMayExclude: -inf is excluded, and stays -inf. Other large scores went
  // through make_finite. is_small: the polynomial certainly serves them.
  template <bool kMayExclude, int kElements>
  __device__ __forceinline__ void of(const Pack<T, kElements>& scores, float (&z)[kElements],
                                     float added = 0.f, bool is_small = false) const {
    const Pack<T, kElements> alone[1] = {scores};
    if (is_small || are_small<kMayExclude>(alone)) {
      exponents_of_small(scores, added, z);
    } else {
      of_large<kMayExclude>(scores, z, added);
    }
  }
  // Of scores that are certainly small.
  __device__ __forceinline__ float of_small(float score) const { return of_polynomial(score); }
  template <int kElements>
  __device__ __forceinline__ void exponents_of_small(const Pack<T, kElements>& scores, float added,
                                                     float (&z)[kElements]) const {
#pragma unroll
    for (int j = 0; j < kElements; ++j) z[j] = of_polynomial(scores[j], added);
  }
  // Of one score that is not excluded.
  __device__ __forceinline__ float of_single(float score) const {
    return are_small(score) ? of_polynomial(score) : of_alone(score * fourfold_);
  }
  // exp2 of logits less `reference`. are_small: as of `of`.
  template <int kElements, int kVectors>
  __device__ __forceinline__ void exponentials(const Pack<T, kElements> (&scores)[kVectors],
                                               bool are_small, float reference,
                                               float (&e)[kVectors][kElements]) const {
    if (are_small) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) exponents_of_small(scores[i], -reference, e[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) of<true>(scores[i], e[i], -reference);
    }
#pragma unroll
    for (auto& of_vector : e) {
#pragma unroll
      for (float& each : of_vector) each = exp2_approximate(each);
    }
  }
  template <int kElements>
  __device__ __forceinline__ void exponentials(const Pack<T, kElements>& scores, bool is_small,
                                               float reference, float (&e)[kElements]) const {
    of<true>(scores, e, -reference, is_small);
#pragma unroll
    for (float& each : e) each = exp2_approximate(each);
  }
  // What makes tanh of a logit. The largest one becomes no less than 1, whose slope is exactly 0.
  __device__ float to_tanh() const { return __uint_as_float(__float_as_uint(1.f / most_) + 1); }

 private:
  // Rounded once: what is kept and what is made again have the same bits.
  __device__ __forceinline__ float of_polynomial(float score, float added = 0.f) const {
    return fmaf(score, small_.over(score), added);
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
  __device__ __forceinline__ void of_large(const Pack<T, kElements>& scores, float (&z)[kElements],
                                           float added) const {
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      float v[4], d[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Hidden: what both ways have in common would be computed before the branch.
        v[j] = __uint_as_float(unknown(__float_as_uint(scores[i + j]))) * fourfold_;
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
        z[i + j] = sizeof(T) == 4 && fabsf(v[j]) < 2.f ? of_polynomial(scores[i + j], added)
                                                       : large + added;
      }
    }
  }

  float fourfold_, most_;
  SmallTanh<5> small_;
};

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

// Before some of these scores are excluded. Returns whether the polynomial serves all, for
// `exponentials`.
template <class T, int kElements, int kVectors>
__device__ __forceinline__ bool prepare_capped(const CappedLogits<T>& capped,
                                               Pack<T, kElements> (&scores)[kVectors]) {
  const bool are_small = capped.template are_small<false>(scores);
  if (!are_small) {
#pragma unroll
    for (auto& pack : scores) make_finite(pack);
  }
  return are_small;
}

}  // namespace megasoftmax
