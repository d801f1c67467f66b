#pragma once
// A tile of keys and one of queries in backward: weights, and gradients of scores. Scores are
// transposed, with keys in rows. A warp has half of the queries of a tile, and as many keys. Two
// warps have the same keys and share their sums: half of the columns each.

#include "../../common/math.cuh"
#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../dropping.cuh"
#include "../exclusion.cuh"
#include "../layout.h"
#include "../softcap.cuh"
#include "tile.cuh"

namespace megasoftmax {

template <class T, BiasKind kBias, int kIndex>
struct BackwardMemory {
  static constexpr AttentionBackwardTile kTile = kAttentionBackwardTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kKeys = kTile.keys(), kQueries = kTile.queries;
  static constexpr int kThreads = kTile.threads(), kSlice = kTile.slice, kSlices = kDim / kSlice;
  static_assert(kMaskTile % kQueries == 0 && (kMaskTile % kKeys == 0 || kKeys % kMaskTile == 0));
  static constexpr int kSide = kTile.side(), kM = kSide / 16, kN = kSide / 8;  // of a warp's scores
  static_assert(kTile.element_bytes == sizeof(T));
  using Scores = Accumulators<kM, kN>;
  using KeyTile = Tile<T, kKeys, kDim>;
  using QueryTile = Tile<T, kQueries, kDim>;
  using ScoreTile = Tile<T, kKeys, kQueries>;
  using Bias = SharedBias<T, kBias, kQueries, kKeys>;
  static constexpr BackwardLayout kLayout{kTile, kBias};
};

// Starts to copy the rows of a tile of queries.
template <int kQueries>
__device__ inline void start_copy_of_rows(const AttentionBackwardParams& params,
                                          RowOfBackward* rows, int batch, int head,
                                          int first_query) {
  const int thread = thread_index_anew(), query = first_query + thread;
  if (thread >= kQueries) return;
  const int64_t row = params.row_index(batch, head, query);
  start_copy_of(shared_address(rows + thread),
                params.rows_of_backward + min(row, params.rows() - 1),
                query < params.queries ? 16 : 0);
}

// This warp's place in a tile; `sharers` warps have the same keys.
struct BackwardWarp {
  int key, query, half;  // of two

  __device__ explicit BackwardWarp(int side, int sharers = 2) {
    const int warp = thread_index_anew() / 32;
    half = warp % sharers;
    key = warp / sharers * side;
    query = half * side;
  }
};

// Where the operands of a step lie in shared memory.
struct BackwardStep {
  uint32_t keys, values, queries, gradients;
  const RowOfBackward* rows;
};

// Where a tile of scores begins.
struct FirstScore {
  int batch, head, query, key;
};

// Computes weights and gradients of logits. Dropped weights are negative. Calls add_bias(scores),
// and `between` when queries and keys are not needed any more. If not kAreOfScores, gradients lack
// the factor |weight|, and the caller excludes. Returns whether delta is finite.
template <class T, BiasKind kBias, bool kIsUnmasked, bool kAreOfScores, class Memory, class AddBias,
          class Between>
__device__ __forceinline__ bool find_score_gradients(
    const AttentionParams& params, const FirstScore& at, const BackwardStep& step,
    const BackwardWarp& warp, const Excluded<Memory::kM, Memory::kN>& excluded,
    typename Memory::Scores& weights, typename Memory::Scores& gradients, AddBias&& add_bias,
    Between&& between) {
  constexpr int kM = Memory::kM, kN = Memory::kN;
  using KeyTile = typename Memory::KeyTile;
  using QueryTile = typename Memory::QueryTile;
  multiply_rows<T, Memory::kDim>(weights, FragmentsDown<KeyTile>({step.keys}, warp.key),
                                 FragmentsAcross<QueryTile>({step.queries}, warp.query));
  if constexpr (kBias == BiasKind::kSoftcap) cap_products<T>(params, weights);
  add_bias(weights);
  between();
  multiply_rows<T, Memory::kDim>(gradients, FragmentsDown<KeyTile>({step.values}, warp.key),
                                 FragmentsAcross<QueryTile>({step.gradients}, warp.query));
  const float to_logit = kBias == BiasKind::kNone ? params.logit_scale : 1.f;
  const RowOfBackward* const columns = step.rows + warp.query + FirstElement().column;
  bool is_finite = true;
  if constexpr (!kAreOfScores) {
    const float delta = step.rows[warp.query + thread_index_anew() % (16 * kM)].delta;
    is_finite = __all_sync(~0u, fabsf(delta) < INFINITY);
  }
  // Two neighbours. drop(gradients, weights) clears gradients and negates weights that are dropped.
  const auto finish = [&](int m, int n, int half, auto&& drop) {
    float* const weight = weights[m][n] + 2 * half;
    float* const gradient = gradients[m][n] + 2 * half;
    const RowOfBackward of_pair[2] = {columns[column_offset(n, 0)], columns[column_offset(n, 1)]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowOfBackward& row = of_pair[i];
      if (kAreOfScores) is_finite = is_finite && fabsf(row.delta) < INFINITY;
      weight[i] =
          exp2_approximate(fmaf(fmaf(weight[i], to_logit, -row.max), kLog2E, -row.log2_sum));
    }
    drop(gradient, weight);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gradient[i] = fmaf(gradient[i], params.dropout.factor, -of_pair[i].delta);
      if (kAreOfScores) gradient[i] *= fabsf(weight[i]);
    }
  };
  if (!kIsUnmasked && params.dropout.seed != nullptr) {
    const Dropping<true> dropping(params, at.batch, at.head);
    dropping.template for_each_pair<kM, kN>(
        at.query + warp.query, at.key + warp.key, [&](int m, int n, int half, uint32_t halves) {
          finish(m, n, half, [&](float* gradient, float* weight) {
            clear_and_negate_below(gradient[0], gradient[1], weight[0], weight[1], halves,
                                   dropping.least);
          });
        });
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kM * kN; ++i)
      finish(i / 2 % kM, i / (2 * kM), i % 2, [](float*, float*) {});
  }
  if constexpr (!kAreOfScores) return is_finite;
  // The score of a weight of 0 has gradient 0, even if the gradient of the weight is not
  // finite. It is finite if delta is.
  if (!is_finite) {
#pragma unroll
    for (int i = 0; i < 4 * kM * kN; ++i) {
      const int m = i / (4 * kN), n = i / 4 % kN;
      if (weights[m][n][i % 4] == 0.f) gradients[m][n][i % 4] = 0.f;
    }
  }
  excluded.apply(weights, 0.f);
  excluded.apply(gradients, 0.f);
  return is_finite;
}

// Writes a tile to an offset of the shared memory, where all warps read it. If kArePositive,
// negative elements become 0.
template <class T, class ScoreTile, bool kArePositive = false, int kM, int kN>
__device__ inline void share_scores(char* tile, const Accumulators<kM, kN>& scores,
                                    const BackwardWarp& warp = BackwardWarp(kM * 16)) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
    store_to_tile<ScoreTile>(tile, warp.key + row_offset(m, 0), scores[m], warp.query,
                             [](float first, float second, int) {
                               return kArePositive ? round_positive_pair<T>(first, second)
                                                   : round_pair<T>(first, second);
                             });
}

}  // namespace megasoftmax
