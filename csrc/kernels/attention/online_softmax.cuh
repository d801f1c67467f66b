#pragma once
// Softmax over tiles of keys that come one after the other: Milakov and Gimelshein,
// https://arxiv.org/abs/1805.02867.

#include "../common/math.cuh"
#include "../common/sink.cuh"
#include "limits.h"
#include "params.h"
#include "sm80/tile.cuh"

namespace megasoftmax {

// Of a warp's kM * 16 rows; this lane holds two of every 16, with three others.
template <int kM>
struct OnlineSoftmax {
  float c;                       // scale * log2(e)
  float max[kM][2], sum[kM][2];  // sums of this lane's columns only

  __device__ explicit OnlineSoftmax(float scale) : c(scale * kLog2E) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      max[m][0] = max[m][1] = -kLargestLogit;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  // Makes scores to weights exp(scale * (score - max)), and scales what was summed before.
  template <int kN, int kColumns>
  __device__ __forceinline__ void step(Accumulators<kM, kN>& scores,
                                       Accumulators<kM, kColumns>& output) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = max[m][half];
#pragma unroll
        for (int n = 0; n < kN; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (__any_sync(~0u, largest != max[m][half])) {
          const float factor = exp2_approximate((max[m][half] - largest) * c);
          sum[m][half] *= factor;
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            output[m][n][2 * half] *= factor;
            output[m][n][2 * half + 1] *= factor;
          }
          max[m][half] = largest;
        }
        // One instruction instead of two; its error is that of rounding max * c.
        const float offset = largest * c;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores[m][n][i] = exp2_approximate(fmaf(scores[m][n][i], c, -offset));
            sum[m][half] += scores[m][n][i];
          }
        }
      }
    }
  }
};

// What remains of a row: its factor and its statistics.
struct RowEnd {
  float factor;  // of the weighted sum of values
  float max;     // over scale
  float log_sum;
  float lse;

  // `sum` relative to `max`, over scale; `sink` -inf joins nothing.
  __device__ RowEnd(float largest, float sum, float scale, float sink) {
    const bool has_keys = sum != 0.f;  // true for NaN
    max = has_keys ? largest : 0.f;
    const float offset = max * scale;
    const float reference = has_keys ? fmaxf(offset, sink) : sink;
    if (!has_keys) {
      factor = 0.f;
      log_sum = lse = sink == INFINITY ? NAN : sink;
      return;
    }
    const float share = exp2_approximate((offset - reference) * kLog2E);
    const float total = sum * share + exp2_approximate((sink - reference) * kLog2E);
    factor = share / total;
    log_sum = logf(total) + (reference - offset);
    lse = offset + log_sum;
  }
};

}  // namespace megasoftmax
