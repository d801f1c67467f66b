#pragma once
// The sink: a logit that joins the denominator but has no column.

#include "../common/reduce.cuh"
#include "../common/sink.cuh"
#include "params.h"

namespace megasoftmax {

// A finite logit in units of log 2 stays finite.
__device__ inline float in_log2(float logit) {
  const float log2 = logit * kLog2E;
  return log2 == -INFINITY && logit != -INFINITY ? kLowest : log2;
}

// The denominator of a row: p = 2^((x - columns.max) * c) * factor.
struct Denominator {
  float max_log2;  // of columns and sink, in units of log 2
  float sum;       // relative to that maximum
  float factor;

  __device__ Denominator(MaxAndSum columns, Exponent exponent, const SinkLogit& sink,
                         int64_t head) {
    max_log2 = fmaxf(columns.max * exponent.c, kLowest);
    sum = columns.sum;
    factor = 1.f;
    if (sink.is_present()) {
      const float columns_log2 = max_log2, sink_log2 = in_log2(sink_logit(sink, head));
      max_log2 = fmaxf(columns_log2, sink_log2);
      factor = exp2_approximate(columns_log2 - max_log2);
      sum = columns.sum * factor + exp2_approximate(sink_log2 - max_log2);
    }
    factor *= reciprocal_approximate(sum);
  }
  __device__ bool is_empty() const { return sum == 0.f; }
  __device__ bool is_regular() const { return sum > 0.f; }  // neither empty nor NaN
  __device__ float log_sum_exp() const {
    return is_empty() ? -INFINITY : max_log2 * kLn2 + logf(sum);
  }
};

}  // namespace megasoftmax
