#pragma once
// The sink: a logit that joins the denominator but has no column.

#include "../common/reduce.cuh"
#include "../common/sink.cuh"
#include "params.h"

namespace megasoftmax {

// The denominator of a row: p = 2^((x - columns.max) * c) * factor.
struct Denominator {
  float max;  // of columns and sink
  float sum;  // relative to that maximum
  float factor;

  __device__ Denominator(MaxAndSum columns, Exponent exponent, const SinkLogit& sink,
                         int64_t head) {
    max = fmaxf(columns.max * (exponent.c * kLn2), kLowest);
    sum = columns.sum;
    factor = 1.f;
    if (sink.is_present()) {
      const float of_columns = max, logit = sink_logit(sink, head);
      max = fmaxf(of_columns, logit);
      factor = exp2_approximate((of_columns - max) * kLog2E);
      sum = columns.sum * factor + exp2_approximate((logit - max) * kLog2E);
    }
    factor *= reciprocal_approximate(sum);
  }
  __device__ bool is_empty() const { return sum == 0.f; }
  __device__ bool is_regular() const { return sum > 0.f; }  // neither empty nor NaN
  __device__ float log_sum_exp() const { return is_empty() ? -INFINITY : max + logf(sum); }
};

}  // namespace megasoftmax
