#pragma once
// Logits of a warp tile, and what the softmax makes of them: their maximum and sum, and what
// replaces the probabilities of a row that has none.

#include "../common/reduce.cuh"
#include "../common/softcap.cuh"
#include "capped.cuh"
#include "denominator.cuh"
#include "row_vectors.cuh"

namespace megasoftmax {

// With a softcap scores become their tanh. Returns the factor that makes logits of them.
template <class T, int kElements>
__device__ inline float factor_of_capped(const LogitOptions& options, float (&scores)[kElements]) {
  if (!options.softcap.is_given()) return options.scale;
  cap_scores<T, false>(scores, options.softcap);
  return options.softcap.cap;
}

// The part that a softcap has in the derivative of logits by these scores.
template <class T, int kElements>
__device__ inline void find_slopes(const Pack<T, kElements>& scores, const Softcap& softcap,
                                   float (&slopes)[kElements]) {
#pragma unroll
  for (int j = 0; j < kElements; ++j) slopes[j] = scores[j];
  cap_scores<T, false>(slopes, softcap);
#pragma unroll
  for (int j = 0; j < kElements; ++j) slopes[j] = slope_of_tanh(slopes[j]);
}

// Makes logits of raw scores. Without a bias they are divided by |scale|, which exponent_of folds
// into exp2. With a softcap and a mask, bias or dropout rows take the instances of a bias, which
// may be absent.
template <class T, class Mask, class Bias>
struct Logits {
  static constexpr int kElements = kPackElements<T>;
  // Columns of a group of vectors that lie kStride apart.
  template <int kStride>
  static constexpr int kGroup = kStride < 32 * kElements ? kStride : 32 * kElements;

  RowIndex index;
  Bounds bounds;
  VectorGrid<kElements> grid;
  Mask mask;

  template <class Params>
  __device__ Logits(const Params& params, const RowIndex& index, const Bounds& bounds,
                    VectorGrid<kElements> grid)
      : index(index), bounds(bounds), grid(grid), mask(params.mask, index) {}

  // Logits of the vectors at column, column + kStride, ...: -inf outside the bounds and where
  // masked. A whole group of vectors is skipped, and unspecified, if its first vector, at first,
  // first + kStride, ..., begins behind the extent. kInside: all are within the bounds.
  template <int kStride, bool kInside, class Params, int kVectors>
  __device__ void of(const Params& params, int first, const Extent& extent, int column,
                     Pack<T> (&raw)[kVectors], float (&z)[kVectors][kElements]) const {
    if constexpr (!Bias::kPresent) {
      exclude<kStride, kInside>(params, first, extent, column, raw);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[i][j] = raw[i][j];
      }
    } else {
      [[maybe_unused]] MaskBytes<kElements> excluded[kVectors];
      if constexpr (Mask::kPresent)
        mask.template load<kElements, kStride, kInside>(column, bounds, excluded);
      Pack<typename Bias::Element, kElements> added[kVectors] = {};
      if (params.bias.data != nullptr) {
        const RowReader<typename Bias::Element, kElements, false> bias(
            params.bias, false, 0, index, grid, bounds, static_cast<int>(params.shape.columns));
        bias.template load<kStride>(column, added);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!kInside && first + i * kStride >= extent.end) continue;
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[i][j] = raw[i][j];
        const float factor = factor_of_capped<T>(params, z[i]);
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          z[i][j] = fmaf(z[i][j], factor, added[i][j]);
          if constexpr (Mask::kPresent) z[i][j] = excluded[i].is_set(j) ? -INFINITY : z[i][j];
        }
        const int at = column + i * kStride;
        if (kInside || extent.inside.contains(first + i * kStride, kGroup<kStride>) ||
            bounds.contains(at, kElements))
          continue;
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[i][j] = bounds.contains(at + j) ? z[i][j] : -INFINITY;
      }
    }
  }

  // Logits without a bias, in the type of the scores. Groups that are skipped are -inf. Those that
  // a softcap caps remain scores, which prepare_capped has made finite.
  template <int kStride, bool kInside, class Params, int kVectors>
  __device__ void exclude(const Params& params, int first, const Extent& extent, int column,
                          Pack<T> (&raw)[kVectors]) const {
    static_assert(!Bias::kPresent);
    [[maybe_unused]] MaskBytes<kElements> excluded[kVectors];
    if constexpr (Mask::kPresent)
      mask.template load<kElements, kStride, kInside>(column, bounds, excluded);
    if (params.scale < 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) raw[i].flip_signs();
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int group = first + i * kStride, at = column + i * kStride;
      if (!kInside && group >= extent.end) {
        raw[i] = Pack<T>::lowest();
        continue;
      }
      if constexpr (Mask::kPresent) excluded[i].lower(raw[i]);
      if (!kInside && !extent.inside.contains(group, kGroup<kStride>))
        raw[i].template fill_outside<Pack<T>::kLowestWord>(bounds.begin - at, bounds.end - at);
    }
  }

  // Logits of an unpaired row.
  template <int kStride, bool kInside, class Params, int kVectors>
  __device__ void of(const Params& params, int first, int column, Pack<T> (&raw)[kVectors],
                     float (&z)[kVectors][kElements]) const {
    of<kStride, kInside>(params, first, Extent{first, bounds.end, {}}, column, raw, z);
  }

  // Logits without a bias, in the type of the scores. The bytes of the mask are those of the same
  // vectors.
  template <int kStride, bool kInside, int kVectors>
  __device__ void prepare(const ForwardParams& params, int column,
                          const MaskBytes<kElements> (&excluded)[kVectors],
                          Pack<T> (&raw)[kVectors]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + i * kStride;
      if constexpr (Bias::kCaps) make_finite(raw[i]);
      if (params.scale < 0) raw[i].flip_signs();
      if constexpr (Mask::kPresent) excluded[i].lower(raw[i]);
      if (!kInside && !bounds.contains(at, kElements))
        raw[i].template fill_outside<Pack<T>::kLowestWord>(bounds.begin - at, bounds.end - at);
    }
  }
};

// exp(z - max z) of the logits that Logits makes.
template <class Bias>
__device__ inline Exponent exponent_of(const ForwardParams& params) {
  if constexpr (Bias::kCaps) return {1.f};
  return {Bias::kPresent ? kLog2E : fabsf(params.scale) * kLog2E};
}

// Adds a warp tile of logits, floats or packs, with maximum `max`, and leaves its
// exponentials relative to the maximum so far. Groups of vectors are skipped where the first begins
// at `end` or behind it.
template <int kStride, class Values, int kVectors, int kElements>
__device__ inline void accumulate(MaxAndSum& mine, bool is_first, float max,
                                  const Values (&logits)[kVectors], float (&z)[kVectors][kElements],
                                  int first, int end, Exponent exponent) {
  max = fmaxf(mine.max, max);
  if (!is_first) mine.sum *= exponent(mine.max, max);
  mine.max = max;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kStride >= end) continue;
#pragma unroll
    for (int j = 0; j < kElements; ++j) z[i][j] = exponent(logits[i][j], max);
    mine.sum += reduce_pairwise(z[i], [](float a, float b) { return a + b; });
  }
}

// The largest logit of such a tile. It is NaN only if all are.
template <int kStride, int kVectors, int kElements>
__device__ inline float largest(const float (&z)[kVectors][kElements], int first, int end) {
  float max = kLowest;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kStride >= end) continue;
    max = fmaxf(max, reduce_pairwise(z[i], [](float a, float b) { return fmaxf(a, b); }));
  }
  return max;
}

// The sum of a lane's part of a warp tile, relative to the maximum of the whole tile. It also adds
// up `other` over the warp, which overlaps the two chains of shuffles.
template <class T, int kElements, int kVectors>
__device__ inline MaxAndSum sum_of(const Pack<T, kElements> (&raw)[kVectors], Exponent exponent,
                                   float& other) {
  MaxAndSum result{warp_max<32>(fmaxf(largest_lane(raw), kLowest)), 0.f};
  other = warp_sum<32>(other);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float e[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) e[j] = exponent(raw[i][j], result.max);
    result.sum += reduce_pairwise(e, [](float a, float b) { return a + b; });
  }
  return result;
}

// The same of scores that a softcap caps, relative to `reference`. With kKeeps the
// exponentials replace the scores.
template <bool kKeeps, class T, int kElements, int kVectors>
__device__ inline MaxAndSum sum_of_capped(Pack<T, kElements> (&raw)[kVectors], bool are_small,
                                          const CappedLogits<T>& capped, float reference,
                                          float& other) {
  MaxAndSum result{reference, 0.f};
  other = warp_sum<32>(other);
  float e[kVectors][kElements];
  capped.exponentials(raw, are_small, reference, e);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    result.sum += reduce_pairwise(e[i], [](float a, float b) { return a + b; });
    if (kKeeps) raw[i] = Pack<T, kElements>::round(e[i]);
  }
  return result;
}

// `special` where an entry is visible, else 0.
template <class Mask, int kElements>
__device__ inline void fill_visible(float special, const Bounds& bounds, const Mask& mask,
                                    int column, float (&p)[kElements]) {
#pragma unroll
  for (int j = 0; j < kElements; ++j)
    p[j] = bounds.contains(column + j) && !mask.excluded(column + j) ? special : 0.f;
}

// A NaN or +inf makes the visible row NaN; nothing left makes it 0 where entries can be excluded,
// NaN elsewhere.
template <class Mask, int kElements>
__device__ inline void replace_special(const ForwardParams& params, const Denominator& denominator,
                                       const Bounds& bounds, const Mask& mask, int column,
                                       float (&p)[kElements]) {
  if (denominator.is_regular()) return;
  const float special = denominator.is_empty() && params.can_exclude ? 0.f : NAN;
  fill_visible(special, bounds, mask, column, p);
}

}  // namespace megasoftmax
