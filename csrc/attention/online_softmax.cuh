#pragma once
// Softmax over tiles of keys that come one after the other: Milakov and Gimelshein,
// https://arxiv.org/abs/1805.02867.

#include "../common/math.cuh"
#include "../common/reduce.cuh"
#include "../common/sink.cuh"
#include "fragments.cuh"
#include "params.h"

namespace megasoftmax {

// Exponents of try_weights: scores times a factor.
struct LinearExponents {
  float factor;

  __device__ __forceinline__ float operator()(float score, float taken) const {
    return fmaf(score, factor, -taken);
  }
  __device__ __forceinline__ static bool are_wrong() { return false; }
};

// The largest offset of a row whose exponents keep their digits: rounded to 2^-12.
inline constexpr float kLargestOffset = 4096.f;

// The softmax of a warp's kM * 16 rows. This lane holds two of every 16 rows, with three others.
template <int kM>
struct OnlineSoftmax {
  float scale;                   // makes logits of scores
  float max[kM][2], sum[kM][2];  // the largest logit; sums of this lane's columns only
  bool can_reuse_max = false;    // the same for all lanes; see try_weights

  __device__ explicit OnlineSoftmax(float scale) : scale(scale) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      max[m][0] = max[m][1] = kLowest;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  // Turns scores, or logits, into weights exp(logit - max). Calls rescale(m, half, factor) for the
  // earlier sums of a row whose maximum changed, and perhaps for other rows. If kMends and some
  // score of the warp is NaN, it first calls mend(), which may change scores.
  template <bool kAreLogits, bool kMends, int kN, class Rescale, class Mend>
  __device__ __forceinline__ void weigh(Accumulators<kM, kN>& scores, Rescale&& rescale,
                                        Mend&& mend) {
    const float to_logit = kAreLogits ? 1.f : scale;
    float largest[kM][2], magnitude = 0.f;
    const auto find = [&](auto&& larger) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        largest[i / 2][i % 2] = largest_of_lane(scores, i / 2, i % 2, larger);
    };
    const auto find_numbers = [&] { find([](float x, float y) { return fmaxf(x, y); }); };
    if constexpr (kMends) {
      find([](float x, float y) { return max_or_nan(x, y); });
      bool has_nan = false;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) has_nan |= isnan(largest[i / 2][i % 2]);
      if (__any_sync(~0u, has_nan)) {
        mend();
        find_numbers();
      }
    } else {
      find_numbers();
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[m][half] = fmaxf(max[m][half], warp_max<4>(largest[m][half]) * to_logit);
        magnitude = fmaxf(magnitude, fabsf(largest[m][half]));
      }
    }
    const bool are_large = is_large(offset_of(magnitude));
    if (are_large) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          take_off<kAreLogits>(scores, m, half, largest[m][half], to_logit);
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row = largest[m][half];
        if (__any_sync(~0u, row != max[m][half]))
          rescale(m, half, raise_max(m, half, row, are_large));
        make_weights(scores, m, half, row, are_large, to_logit);
      }
    }
  }

  template <bool kAreLogits, int kN, class Rescale>
  __device__ __forceinline__ void weigh(Accumulators<kM, kN>& scores, Rescale&& rescale) {
    weigh<kAreLogits, false>(scores, rescale, [] {});
  }

  // Rounds weights of 16 rows to factors of a product, relative to the maxima of earlier tiles. The
  // logits of a tile seldom exceed those by much, and then earlier sums need no scaling. A weight
  // is 2^exponents(score, max * log2(e)). Returns the same for all lanes: whether the exponents are
  // right and the weights small enough. Else only `weights` has changed. Only for rows that can
  // reuse their maxima. If kDrops, drop(first, weights) may change what is rounded, but not what is
  // summed: of 32 keys at a time, eights of them from `first` on.
  template <class T, bool kDrops, int kN, class Exponents, class Drop>
  __device__ __forceinline__ bool try_weights(const Accumulators<kM, kN>& scores,
                                              uint32_t (&weights)[kN / 2][4], Exponents exponents,
                                              Drop&& drop) {
    constexpr int kTogether = kDrops ? 4 : kN;
    static_assert(kM == 1 && kN % kTogether == 0);
    float total[2] = {};
#pragma unroll
    for (int first = 0; first < kN; first += kTogether) {
      float some[kTogether][4];
      const auto round = [&](int n, int half) {
        weights[(first + n) / 2][n % 2 * 2 + half] =
            round_pair<T>(some[n][2 * half], some[n][2 * half + 1]);
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float taken = offset_of(max[0][half]);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            some[n][i] = exp2_approximate(exponents(scores[0][first + n][i], taken));
            total[half] += some[n][i];
          }
          if constexpr (!kDrops) round(n, half);
        }
      }
      if constexpr (kDrops) {
        drop(first, some);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          round(n, 0);
          round(n, 1);
        }
      }
    }
    // NaN fails this comparison.
    const bool are_small = total[0] + total[1] <= kMostOfTile;
    if (__any_sync(~0u, !are_small || exponents.are_wrong())) return false;
    sum[0][0] += total[0];
    sum[0][1] += total[1];
    return true;
  }
  // Decides whether try_weights may reuse the maxima that weigh just found, which were `before`: if
  // logits are finite, not large, and rise slowly or begin here.
  __device__ __forceinline__ void decide_reuse(const float (&before)[2]) {
    bool must_find = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float row = max[0][half];
      must_find |= !(sum[0][half] < INFINITY) || fabsf(offset_of(row)) > kLargestOffset ||
                   (before[half] != kLowest && row - before[half] > kMostRise);
    }
    can_reuse_max = !__any_sync(~0u, must_find);
  }

  // Calls weigh, and scales the sums of values times weights.
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
  // Most of a lane's weights in a tile, summed, relative to earlier maxima: float16 has room for
  // them. Logits that rise by at most kMostRise do not reach it.
  static constexpr float kMostOfTile = 16384.f, kMostRise = 5.f;

  // The largest score of this lane in a row.
  template <int kN, class Larger>
  __device__ __forceinline__ static float largest_of_lane(const Accumulators<kM, kN>& scores, int m,
                                                          int half, Larger&& larger) {
    float row;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float pair = larger(scores[m][n][2 * half], scores[m][n][2 * half + 1]);
      row = n == 0 ? pair : larger(row, pair);
    }
    return row;
  }
  // Exponents are score * c - offset, in one instruction instead of two. All weights of a row then
  // have the same error, from rounding max * log2(e), and the sum has it too. The error from
  // rounding c is 2^-24 of an exponent. If the offset of some row of the warp is large, the maximum
  // is subtracted first.
  __device__ __forceinline__ static float offset_of(float row) { return __fmul_rn(row, kLog2E); }
  __device__ __forceinline__ static bool is_large(float offset) {
    return __any_sync(~0u, fabsf(offset) > kLargestOffset);
  }
  template <bool kAreLogits, int kN>
  __device__ __forceinline__ void take_off(Accumulators<kM, kN>& scores, int m, int half, float row,
                                           float to_logit) const {
    const float back = kAreLogits ? 1.f : 1.f / scale;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i)
        scores[m][n][i] = fmaf(scores[m][n][i], to_logit, -row) * back;
    }
  }
  // Returns the factor of earlier sums. It is rounded as the offset is. If it were fused, rows
  // whose maximum stays would have a factor other than 1 with each tile.
  __device__ __forceinline__ float raise_max(int m, int half, float row, bool are_large) {
    const float factor = exp2_approximate(are_large ? (max[m][half] - row) * kLog2E
                                                    : offset_of(max[m][half]) - offset_of(row));
    sum[m][half] *= factor;
    max[m][half] = row;
    return factor;
  }
  template <int kN>
  __device__ __forceinline__ void make_weights(Accumulators<kM, kN>& scores, int m, int half,
                                               float row, bool are_large, float to_logit) {
    const float c = to_logit * kLog2E, taken = are_large ? 0.f : offset_of(row);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[m][n][i] = exp2_approximate(fmaf(scores[m][n][i], c, -taken));
        sum[m][half] += scores[m][n][i];
      }
    }
  }
};

// The end of a row: the factor of its output, and its statistics.
struct RowEnd {
  float factor;  // of the weighted sum of values
  float max;     // of logits
  float log_sum;
  float lse;

  // `sum`: of weights relative to `largest`, the largest logit, to all of which `bias` is added. A
  // sink of -infinity adds nothing. A row without a visible key is NaN unless a key can be
  // excluded.
  __device__ RowEnd(float largest, float sum, float bias, float sink, bool can_exclude) {
    const float logit = largest + bias, reference = fmaxf(logit, sink);
    const float share = exp2_approximate((logit - reference) * kLog2E);
    const float total = sum * share + exp2_approximate((sink - reference) * kLog2E);
    const float log_total = logf(total);
    // No branch, so that the two rows of a lane are computed together.
    const bool is_empty = sum == 0.f || (bias == -INFINITY && !isnan(sum));
    const float nothing = can_exclude ? 0.f : NAN, sink_alone = sink == INFINITY ? NAN : sink;
    const float check = bias * 0.f;  // NaN, if a visible logit is no finite number
    factor = is_empty ? nothing : __fdividef(share, total) + check;
    // Backward takes the bias from `max`, and finds the largest logit without it, but for what
    // `logit` lost.
    max = is_empty ? 0.f : logit;
    log_sum = is_empty ? sink_alone
                       : log_total + (reference - logit) + (largest - (logit - bias)) + check;
    lse = is_empty ? sink_alone : reference + log_total + check;
  }

  __device__ void store(const AttentionParams& params, int64_t row) const {
    params.statistics[row] = max;
    params.statistics[params.rows() + row] = log_sum;
    params.statistics[2 * params.rows() + row] = lse;
  }
};

// The end of the rows of a head: what the options of the logits add to the sums over keys.
class RowEnds {
 public:
  __device__ RowEnds(const AttentionParams& params, int64_t batch, int head)
      : params_(params),
        batch_(static_cast<int>(batch)),
        head_(head),
        sink_(params.sink.of_head(head)) {}

  // The end of the row of a query, or of any number, with this largest logit and sum of weights
  // relative to it.
  __device__ RowEnd of(int query, float largest, float sum) const {
    return RowEnd(largest, sum, bias_of(query), sink_, params_.can_exclude);
  }
  // For kernels with a dense bias: there is no bias of queries beside it.
  __device__ RowEnd of(float largest, float sum) const {
    return RowEnd(largest, sum, 0.f, sink_, params_.can_exclude);
  }
  // Backward: stores a row's gradient of the sink, if that is wanted, and returns it.
  __device__ float store_gradient(const AttentionBackwardParams& params, int64_t row,
                                  float delta) const {
    const float gradient = sink_ == -INFINITY
                               ? 0.f
                               : -expf(sink_ - params.statistics[2 * params.rows() + row]) * delta;
    if (params.sink_gradient != nullptr) params.sink_gradient[row] = gradient;
    return gradient;
  }

  // What is added to all logits of a query, or of any number.
  __device__ float bias_of(int query) const {
    const Strided& rows = params_.row_bias;
    if (rows.data == nullptr) return 0.f;
    int entry_batch, entry_head;
    params_.entry_of_bias(batch_, head_, entry_batch, entry_head);
    query = min(max(query, 0), params_.queries - 1);
    return with_dtype(rows.type, [&](auto tag) {
      return to_float(*rows.row<const decltype(tag)>(entry_batch, entry_head, query));
    });
  }

 private:
  const AttentionParams& params_;
  int batch_, head_;
  float sink_;
};

}  // namespace megasoftmax
