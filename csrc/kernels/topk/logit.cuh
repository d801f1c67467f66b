#pragma once
// One logit, read again: bit for bit what Logits makes of its chunk.

#include "../softmax/forward.cuh"
#include "params.h"

namespace megasoftmax {

template <class T, class Mask, class Bias>
__device__ inline float logit_at(const TopkParams& params, const RowIndex& index, const Mask& mask,
                                 const T* row, int column) {
  float z = to_float(row[column * params.scores.column_stride]);
  if constexpr (Bias::kPresent) {
    const auto* const bias = static_cast<const typename Bias::Element*>(params.bias.data) +
                             index.offset_in(params.bias);
    z = fmaf(z, params.scale, to_float(bias[column * params.bias.column_stride]));
  } else if (params.scale < 0) {
    z = -z;
  }
  return mask.excluded(column) ? -INFINITY : z;
}

}  // namespace megasoftmax
