#pragma once
// What the backward pass of a row begins with: incoming gradients and probabilities. Both are read,
// or with dropout or a softcap scores are read and probabilities computed again. Gradients of
// dropped entries are cleared.

#include "dropping.cuh"
#include "logits.cuh"

namespace megasoftmax {

// sum(g * p) of a vector; clears g where p is 0.
template <class T, int kElements>
__device__ inline float dot(Pack<T, kElements>& g, const Pack<T, kElements>& p) {
  g.clear_where_zero(p);
  float products[kElements / 2];
#pragma unroll
  for (int j = 0; j < kElements / 2; ++j)
    products[j] = fmaf(p[2 * j], g[2 * j], p[2 * j + 1] * g[2 * j + 1]);
  return reduce_pairwise(products, [](float a, float b) { return a + b; });
}

template <class T>
struct ProbabilitiesRead {
  using Element = T;
  static constexpr bool kMakes = false, kMayDrop = false;
  using Entries = AllEntries;
  static constexpr int blocks_per_sm(int of_regime) { return of_regime; }
  // What gradients are multiplied by.
  __device__ static constexpr float factor(const BackwardParams&) { return 1.f; }

  template <bool kOfScores>
  __device__ static float scale(const BackwardParams& params) {
    return params.scale;
  }
  __device__ ProbabilitiesRead(const BackwardParams&, const RowIndex&, const Bounds&,
                               VectorGrid<kPackElements<T>>) {}
};

// What a slope of 1 of a softcap is in products with probabilities: those of float16 are raised,
// because it has no small numbers.
template <class T>
inline constexpr float kRaisedSlope = std::is_same_v<T, __half> ? 16384.f : 1.f;

// p = exp(z - lse), rounded to T, as probabilities that are read.
template <class T, class Mask, class Bias>
struct ProbabilitiesMadeAgain {
  using Element = T;
  static constexpr bool kMakes = true, kMayDrop = true;
  using Entries = KeptEntries;
  static constexpr int kElements = kPackElements<T>;
  static constexpr int blocks_per_sm(int of_regime) {
    return Bias::blocks_per_sm(Mask::blocks_per_sm(of_regime));
  }
  __device__ static float factor(const BackwardParams& params) {
    return KeptEntries::factor(params);
  }
  template <bool kOfScores>
  __device__ static bool has_slopes(const BackwardParams& params) {
    return kOfScores && Bias::kPresent && params.softcap.is_given();
  }
  // What makes gradients of scores of those of logits.
  template <bool kOfScores>
  __device__ static float scale(const BackwardParams& params) {
    return has_slopes<kOfScores>(params) ? params.scale / kRaisedSlope<T> : params.scale;
  }

  const BackwardParams& params;
  Logits<T, Mask, Bias> logits;
  KeptEntries entries;
  float log_sum_exp;

  __device__ ProbabilitiesMadeAgain(const BackwardParams& params, const RowIndex& index,
                                    const Bounds& bounds, VectorGrid<kElements> grid)
      : params(params),
        logits(params, index, bounds, grid),
        entries(params, index),
        log_sum_exp(params.log_sum_exp[index.row(params.shape)]) {}

  // Makes probabilities of scores, 0 outside the bounds, and clears gradients that are dropped.
  // Returns the sum of their products. With kOfScores probabilities are then multiplied by the
  // softcap's part of the derivative of logits by scores. Vectors as in Logits::of, of kLanes lanes
  // in turn.
  template <int kLanes, bool kIsPair, bool kOfScores, int kVectors>
  __device__ float make(const Extent& extent, Pack<T> (&gradients)[kVectors],
                        Pack<T> (&scores)[kVectors]) const {
    constexpr int kStride = kLanes * kElements;
    const int first = extent.first_column, end = extent.end;
    const int column = first + static_cast<int>(threadIdx.x % kLanes) * kElements;
    const auto kept =
        entries.template of_tile<kLanes, kIsPair, kElements, kVectors, Bias::kPresent>(first, end);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int begin = first + i * kStride, at = column + i * kStride;
      if (begin >= end) {
        scores[i] = {};
        continue;
      }
      float p[1][kElements];
      Pack<T> raw[1] = {scores[i]};
      logits.template of<kStride, false>(params, begin, extent, at, raw, p);
      to_probabilities(at, p[0]);
      scores[i] = Pack<T>::round(p[0]);
      kept.drop(i, gradients[i]);
      sum += dot(gradients[i], scores[i]);
      if (!has_slopes<kOfScores>(params)) continue;
      float slopes[kElements];
      find_slopes(raw[0], params.softcap, slopes);
#pragma unroll
      for (int j = 0; j < kElements; ++j) slopes[j] *= kRaisedSlope<T> * p[0][j];
      scores[i] = Pack<T>::round(slopes);
    }
    return sum;
  }

 private:
  __device__ void to_probabilities(int column, float (&z)[kElements]) const {
    if (log_sum_exp > -INFINITY) {
      const float scale = fabsf(params.scale);  // the logits have its sign
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const float difference =
            Bias::kPresent ? z[j] - log_sum_exp : fmaf(z[j], scale, -log_sum_exp);
        z[j] = exp2_approximate(difference * kLog2E);
      }
    } else {  // as replace_special
      const bool is_empty = log_sum_exp == -INFINITY && params.can_exclude;
      fill_visible(is_empty ? 0.f : NAN, logits.bounds, logits.mask, column, z);
    }
  }
};

// p = exp(z - lse) of rows that a softcap alone bends, and p times the slopes of the softcap.
template <class T>
class CappedProbabilities {
 public:
  __device__ CappedProbabilities(const Softcap& softcap, float log_sum_exp)
      : logits_(softcap, false),
        to_tanh_(logits_.to_tanh()),
        rest_(log_sum_exp == -INFINITY ? 0.f : log_sum_exp * -kLog2E) {}

  template <int kElements, int kPacks>
  __device__ __forceinline__ bool are_small(const Pack<T, kElements> (&scores)[kPacks]) const {
    return logits_.template are_small<false>(scores);
  }
  // Rounded to T, as probabilities that are read. What lies outside the bounds is unspecified.
  // is_small: as of CappedLogits::of.
  template <int kElements>
  __device__ __forceinline__ Pack<T, kElements> of(const Pack<T, kElements>& scores, bool is_small,
                                                   Pack<T, kElements>& sloped) const {
    float z[kElements], p[kElements];
    logits_.template of<false>(scores, z, 0.f, is_small);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      p[j] = exp2_approximate(z[j] + rest_);
      z[j] = p[j] * raised_slope(z[j]);
    }
    sloped = Pack<T, kElements>::round(z);
    return Pack<T, kElements>::round(p);
  }
  __device__ float of_single(float score, float& slope) const {
    const float z = logits_.of_single(score);
    slope = raised_slope(z);
    return to_float(from_float<T>(exp2_approximate(z + rest_)));
  }

 private:
  __device__ float raised_slope(float z) const {
    return slope_of_tanh(z * to_tanh_) * kRaisedSlope<T>;
  }

  CappedLogits<T> logits_;
  float to_tanh_, rest_;
};

// Inputs of such rows: scores are read.
template <class T>
struct CappedScoresRead {
  using Element = T;
  static constexpr bool kMakes = true, kMayDrop = false;
  using Entries = AllEntries;
  static constexpr int kElements = kPackElements<T>;
  static constexpr int blocks_per_sm(int of_regime) { return of_regime; }
  __device__ static constexpr float factor(const BackwardParams&) { return 1.f; }
  template <bool kOfScores>
  __device__ static float scale(const BackwardParams& params) {
    return params.scale / kRaisedSlope<T>;
  }

  const Softcap& softcap;
  Bounds bounds;
  float log_sum_exp;

  __device__ CappedScoresRead(const BackwardParams& params, const RowIndex& index,
                              const Bounds& bounds, VectorGrid<kElements>)
      : softcap(params.softcap),
        bounds(bounds),
        log_sum_exp(params.log_sum_exp[index.row(params.shape)]) {}

  // As ProbabilitiesMadeAgain::make.
  template <int kLanes, bool kIsPair, bool kOfScores, int kVectors>
  __device__ float make(const Extent& extent, Pack<T> (&gradients)[kVectors],
                        Pack<T> (&scores)[kVectors]) const {
    static_assert(!kIsPair && kOfScores);
    const CappedProbabilities<T> capped(softcap, log_sum_exp);
    const bool are_small = capped.are_small(scores);
    constexpr int kStride = kLanes * kElements;
    const int column = extent.first_column + static_cast<int>(threadIdx.x % kLanes) * kElements;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + i * kStride;
      Pack<T> sloped = {};
      if (extent.first_column + i * kStride < extent.end) {
        // Scores beside the row would decide how tanh of the others is made.
        const bool is_cut = !bounds.contains(at, kElements);
        if (is_cut) scores[i].template fill_outside<0>(bounds.begin - at, bounds.end - at);
        Pack<T> p = capped.of(scores[i], are_small, sloped);
        if (is_cut) {
          p.template fill_outside<0>(bounds.begin - at, bounds.end - at);
          sloped.template fill_outside<0>(bounds.begin - at, bounds.end - at);
        }
        sum += dot(gradients[i], p);
      }
      scores[i] = sloped;
    }
    return sum;
  }
};

}  // namespace megasoftmax
