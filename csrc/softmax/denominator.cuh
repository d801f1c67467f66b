#pragma once
// The denominator of a row, from the maximum and sum of its logits and from the options. A sink is
// a logit that joins the denominator but has no column.

#include "../common/reduce.cuh"
#include "../common/sink.cuh"
#include "params.h"

namespace megasoftmax {

// p = 2^((x - columns.max) * c) * factor
struct Denominator {
  float max;  // of columns and sink
  float sum;  // relative to that maximum
  float factor;

  __device__ Denominator(MaxAndSum columns, Exponent exponent, const LogitOptions& options,
                         int64_t head)
      : Denominator(columns, exponent, options.sink, head) {}
  __device__ Denominator(MaxAndSum columns, Exponent exponent, const SinkLogit& sink = {},
                         int64_t head = 0) {
    max = fmaxf(columns.max * (exponent.c * kLn2), kLowest);
    sum = columns.sum;
    factor = 1.f;
    if (sink.is_present()) {
      const float of_columns = max, logit = sink.of_head(head);
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

// What bounded logits are relative to in place of their maximum, in units of exp2: 0, or a sink
// above it, up to 128. Exponentials are finite. Where one underflows, its probability does too:
// logits are at most 64, and `Denominator` is relative to the sink itself.
__device__ inline float reference_of_bounded(const LogitOptions& options, int64_t head) {
  const SinkLogit& sink = options.sink;
  return sink.is_present() ? fminf(fmaxf(sink.of_head(head), 0.f), 128.f) * kLog2E : 0.f;
}

// Sums relative to such a reference as `Denominator` takes them: a sink far below the reference
// remains where no column counts.
__device__ inline MaxAndSum of_bounded(MaxAndSum columns) {
  if (columns.sum == 0.f) columns.max = kLowest;
  return columns;
}

// d sink = -p_sink * D of a row. `logit`: its sink.
__device__ inline void write_sink_gradient(const BackwardParams& params, int64_t row, float d,
                                           float logit) {
  const float share = exp2_approximate((logit - params.log_sum_exp[row]) * kLog2E);
  params.sink_gradient[row] = logit == -INFINITY ? 0.f : -share * d;
}

// D = sum(g * p) - h of a row from its sum. Also writes the gradients of options.
__device__ inline float finish_dot(const BackwardParams& params, int64_t row, int head, float sum,
                                   bool writes) {
  const float d =
      params.log_sum_exp_gradient == nullptr ? sum : sum - params.log_sum_exp_gradient[row];
  if (params.sink_gradient != nullptr && writes)
    write_sink_gradient(params, row, d, params.sink.of_head(head));
  return d;
}

// The options of each row of a tile that spans heads.
class TileOptions {
 public:
  // Shared memory: a logit for each row of the tile, if heads have their own.
  static int bytes(const LogitOptions& options, int rows) {
    return options.sink.data != nullptr ? rows * static_cast<int>(sizeof(float)) : 0;
  }

  __device__ TileOptions(const LogitOptions& options, char* shared)
      : options_(options), logits_(reinterpret_cast<float*>(shared)) {}

  __device__ bool need_loading() const { return options_.sink.data != nullptr; }
  // By all threads. head_of(i): the head of row i of the tile.
  template <class HeadOf>
  __device__ void load(int rows, int threads, HeadOf&& head_of) const {
    for (int row = threadIdx.x; row < rows; row += threads)
      logits_[row] = options_.sink.of_head(head_of(row));
  }
  __device__ float logit_of(int row) const {
    return need_loading() ? logits_[row] : options_.sink.value;
  }
  __device__ SinkLogit of_row(int row) const {
    SinkLogit sink;
    sink.value = logit_of(row);
    return sink;
  }

 private:
  const LogitOptions& options_;
  float* logits_;
};

}  // namespace megasoftmax
