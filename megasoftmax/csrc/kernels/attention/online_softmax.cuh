#pragma once
// Softmax over tiles of keys that come one after the other: Milakov and Gimelshein,
// https://arxiv.org/abs/1805.02867.

#include "../common/math.cuh"
#include "../common/reduce.cuh"
#include "../common/sink.cuh"
#include "fragments.cuh"
#include "params.h"

namespace megasoftmax {

// Of a warp's kM * 16 rows; this lane holds two of every 16, with three others.
template <int kM>
struct OnlineSoftmax {
  float scale;                   // makes logits of scores
  float max[kM][2], sum[kM][2];  // the largest logit; sums of this lane's columns only

  __device__ explicit OnlineSoftmax(float scale) : scale(scale) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      max[m][0] = max[m][1] = kLowest;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  // Makes scores, or logits, to weights exp(logit - max). Calls rescale(m, half, factor) for what
  // was summed with the weights before of a row whose maximum changed, and perhaps of others.
  template <bool kAreLogits, int kN, class Rescale>
  __device__ __forceinline__ void weigh(Accumulators<kM, kN>& scores, Rescale&& rescale) {
    const float to_logit = kAreLogits ? 1.f : scale;
    float largest[kM][2], magnitude = 0.f;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row = -INFINITY;
#pragma unroll
        for (int n = 0; n < kN; ++n)
          row = fmaxf(row, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        largest[m][half] = fmaxf(max[m][half], warp_max<4>(row) * to_logit);
        magnitude = fmaxf(magnitude, fabsf(largest[m][half]));
      }
    }
    // The exponent in one instruction instead of two: all weights of a row then have the same
    // error, that of rounding max * log2(e), which the sum has too; that of rounding the factor of
    // a score is 2^-24 of it. Where the maximum is large it is taken off first.
    const bool is_large = __any_sync(~0u, magnitude * kLog2E > kLargestOffset);
    const float c = to_logit * kLog2E;
    if (is_large) {
      const float back = kAreLogits ? 1.f : 1.f / scale;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            scores[m][n][i] = fmaf(scores[m][n][i], to_logit, -largest[m][i / 2]) * back;
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row = largest[m][half], offset = __fmul_rn(row, kLog2E);
        if (__any_sync(~0u, row != max[m][half])) {
          // Rounded as the offset was: fused, a row whose maximum stays would have a factor that is
          // not 1, again with each tile.
          const float factor = exp2_approximate(
              is_large ? (max[m][half] - row) * kLog2E : __fmul_rn(max[m][half], kLog2E) - offset);
          sum[m][half] *= factor;
          rescale(m, half, factor);
          max[m][half] = row;
        }
        const float taken = is_large ? 0.f : offset;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores[m][n][i] = exp2_approximate(fmaf(scores[m][n][i], c, -taken));
            sum[m][half] += scores[m][n][i];
          }
        }
      }
    }
  }

  // The same, and scales what was summed.
  template <bool kAreLogits, int kN, int kColumns>
  __device__ __forceinline__ void step(Accumulators<kM, kN>& scores,
                                       Accumulators<kM, kColumns>& output) {
    weigh<kAreLogits>(scores, [&](int m, int half, float factor) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        output[m][n][2 * half] *= factor;
        output[m][n][2 * half + 1] *= factor;
      }
    });
  }

 private:
  static constexpr float kLargestOffset = 4096.f;  // rounded to 2^-12
};

// What remains of a row: its factor and its statistics.
struct RowEnd {
  float factor;  // of the weighted sum of values
  float max;     // of logits
  float log_sum;
  float lse;

  // `sum` relative to `largest`, the largest logit; `sink` -inf joins nothing. A row where nothing
  // can be excluded is no number when nothing is left of it.
  __device__ RowEnd(float largest, float sum, float sink, bool can_exclude) {
    if (sum == 0.f) {
      factor = can_exclude ? 0.f : NAN;
      max = 0.f;
      log_sum = lse = sink == INFINITY ? NAN : sink;
      return;
    }
    max = largest;
    const float reference = fmaxf(max, sink);
    const float share = exp2_approximate((max - reference) * kLog2E);
    const float total = sum * share + exp2_approximate((sink - reference) * kLog2E);
    factor = share / total;
    log_sum = logf(total) + (reference - max);
    lse = reference + logf(total);
  }

  __device__ void store(const AttentionParams& params, int64_t row) const {
    params.statistics[row] = max;
    params.statistics[params.rows() + row] = log_sum;
    params.statistics[2 * params.rows() + row] = lse;
  }
};

}  // namespace megasoftmax
