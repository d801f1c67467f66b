#pragma once
// What regimes share: one logit, and what is kept of a row for its backward.

#include "../softmax/forward.cuh"
#include "params.h"

namespace megasoftmax {

// Read again: bit for bit what Logits makes of its vector.
template <class T, class Mask, class Bias>
__device__ inline float logit_at(const TopkParams& params, const RowIndex& index, const Mask& mask,
                                 const T* row, int column) {
  float z = to_float(row[column * params.scores.column_stride]);
  if constexpr (Bias::kPresent) {
    const auto* const bias =
        static_cast<const typename Bias::Element*>(params.bias.data) + index.offset_in(params.bias);
    float score[1] = {z};
    const float factor = factor_of_capped<T>(params, score);
    const float added =
        params.bias.data == nullptr ? 0.f : to_float(bias[column * params.bias.column_stride]);
    z = fmaf(score[0], factor, added);
  } else if (params.scale < 0) {
    z = -z;
  }
  return mask.excluded(column) ? -INFINITY : z;
}

// z in units of Logits: |scale| without a bias, which is NaN where a row has no scale.
template <class Bias>
__device__ inline float unit_of(const TopkParams& params, int64_t row) {
  if constexpr (Bias::kPresent || Bias::kCaps) return 1.f;
  if (params.row_scale.data == nullptr) return fabsf(params.scale);
  const float scale = params.row_scale.at(row);
  return scale >= kTiniestRowScale && scale <= kLargestRowScale ? scale : NAN;
}

struct RowStatistics {
  float max;  // in units of Logits, see unit_of
  float sum, log_sum, lse;

  __device__ RowStatistics(MaxAndSum total, float unit)
      : max(total.max), sum(total.sum), log_sum(logf(sum)), lse(fmaf(max, unit, log_sum)) {}
  __device__ bool is_empty() const { return sum == 0.f; }
  __device__ bool is_regular() const { return sum > 0.f; }  // neither empty nor NaN

  __device__ void write(const TopkParams& params, int64_t row) const {
    const float special = is_empty() ? -INFINITY : NAN;
    params.statistics[row] = is_regular() ? max : special;
    params.statistics[params.rows + row] = is_regular() ? log_sum : special;
    params.statistics[2 * params.rows + row] = is_regular() ? lse : special;
  }
};

}  // namespace megasoftmax
