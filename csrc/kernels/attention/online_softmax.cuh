#pragma once
// Softmax over tiles of keys that come one after the other: Milakov and Gimelshein,
// https://arxiv.org/abs/1805.02867.

#include "../common/math.cuh"
#include "../common/sink.cuh"
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
      max[m][0] = max[m][1] = kLowest;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  // Makes scores to weights exp(scale * (score - max)), and scales what was summed before.
  template <int kN, int kColumns>
  __device__ __forceinline__ void step(Accumulators<kM, kN>& scores,
                                       Accumulators<kM, kColumns>& output) {
    float largest[kM][2], magnitude = 0.f;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& row = largest[m][half];
        row = max[m][half];
#pragma unroll
        for (int n = 0; n < kN; ++n)
          row = fmaxf(row, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        row = fmaxf(row, __shfl_xor_sync(~0u, row, 1));
        row = fmaxf(row, __shfl_xor_sync(~0u, row, 2));
        magnitude = fmaxf(magnitude, fabsf(row));
      }
    }
    // (score - max) * c in one instruction instead of two: all weights of a row then have the
    // same error, that of rounding max * c, which the sum has too. Where that is large, in two.
    if (__any_sync(~0u, magnitude * c > kLargestOffset)) {
      step_to<true>(largest, scores, output);
    } else {
      step_to<false>(largest, scores, output);
    }
  }

 private:
  static constexpr float kLargestOffset = 4096.f;  // rounded to 2^-12

  template <bool kExact, int kN, int kColumns>
  __device__ __forceinline__ void step_to(const float (&largest)[kM][2],
                                          Accumulators<kM, kN>& scores,
                                          Accumulators<kM, kColumns>& output) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row = largest[m][half], offset = __fmul_rn(row, c);
        if (__any_sync(~0u, row != max[m][half])) {
          // Rounded as the offset was: fused, a row whose maximum stays would have a factor that is
          // not 1, again with each tile.
          const float factor = exp2_approximate(kExact ? (max[m][half] - row) * c
                                                       : __fmul_rn(max[m][half], c) - offset);
          sum[m][half] *= factor;
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            output[m][n][2 * half] *= factor;
            output[m][n][2 * half + 1] *= factor;
          }
          max[m][half] = row;
        }
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            float& score = scores[m][n][i];
            score = exp2_approximate(kExact ? (score - row) * c : fmaf(score, c, -offset));
            sum[m][half] += score;
          }
        }
      }
    }
  }
};

// What remains of a row: its factor and its statistics.
struct RowEnd {
  float factor;  // of the weighted sum of values
  float max;     // of scores
  float log_sum;
  float lse;

  // `sum` relative to `largest`, the largest score; `rest` makes it a logit; `sink` -inf joins
  // nothing. A row where nothing can be excluded is no number when nothing is left of it.
  __device__ RowEnd(float largest, float sum, float rest, float sink, bool can_exclude) {
    if (sum == 0.f) {
      factor = can_exclude ? 0.f : NAN;
      max = 0.f;
      log_sum = lse = sink == INFINITY ? NAN : sink;
      return;
    }
    max = largest;
    // A bias of the lowest number divided by `rest` may be a little lower times `rest`.
    const float offset = fmaxf(max * rest, kLowest), reference = fmaxf(offset, sink);
    const float share = exp2_approximate((offset - reference) * kLog2E);
    const float total = sum * share + exp2_approximate((sink - reference) * kLog2E);
    factor = share / total;
    log_sum = logf(total) + (reference - offset);
    lse = reference + logf(total);
  }
};

}  // namespace megasoftmax
