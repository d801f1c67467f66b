#pragma once
// Gradients of O = softmax(S) V, S = scale * Q K^T + B:
//   P = exp(S - lse),  dV = P^T dO,  dS = P (dO V^T - delta),  delta = rowsum(dO O) - dlse,
//   dK = scale * dS^T Q,  dQ = scale * dS K,  dB = dS.
//
// A block owns a tile of keys and values, a warp 16 of them, and takes one tile of queries after
// the other, of all heads that share the keys. Scores are transposed, with keys in rows, so that
// they are what the products with dO and Q need. dQ is summed in float32 in global memory, over
// blocks in any order.

#include "../../common/math.cuh"
#include "../../common/sink.cuh"
#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../exclusion.cuh"
#include "../limits.h"
#include "../params.h"
#include "tile.cuh"

namespace megasoftmax {

// Row by row, a warp each: what all blocks of the backward need, and the sink's gradient.
template <class T>
__global__ void __launch_bounds__(128)
    attention_rows_kernel(const __grid_constant__ AttentionBackwardParams params) {
  const int64_t row = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  if (row >= params.rows()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t of_head = row / params.queries;
  const int query = static_cast<int>(row - of_head * params.queries);
  const int head = static_cast<int>(of_head % params.heads);
  const int64_t batch = of_head / params.heads;
  const auto row_of = [&](const Strided& tensor) {
    return static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
           head * tensor.head_stride + query * tensor.query_stride;
  };
  float delta = 0.f;
  if (lane * 8 < params.value_dim) {
    const auto output = load_streaming<T, 8>(row_of(params.output) + lane * 8);
    const auto gradient = load_streaming<T, 8>(row_of(params.output_gradient) + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) delta = fmaf(output[i], gradient[i], delta);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    delta += __shfl_xor_sync(~0u, delta, distance);
  if (lane != 0) return;
  const float max = params.statistics[row], log_sum = params.statistics[params.rows() + row];
  if (params.lse_gradient != nullptr) delta -= params.lse_gradient[row];
  const bool is_empty = log_sum == -INFINITY;
  params.rows_of_backward[row] = {max / params.to_statistics, is_empty ? INFINITY : log_sum * kLog2E,
                                  delta, 0.f};
  const float sink = params.sink.is_present() ? sink_logit(params.sink, head) : -INFINITY;
  const float sink_gradient =
      sink == -INFINITY ? 0.f : -expf(sink - params.statistics[2 * params.rows() + row]) * delta;
  if (params.sink_gradient != nullptr) params.sink_gradient[row] = sink_gradient;
  // All logits and the sink together have the gradient of the log-sum-exp.
  if (params.bias_gradient_kind == BiasGradient::kQueries) {
    const float of_lse = params.lse_gradient == nullptr ? 0.f : params.lse_gradient[row];
    static_cast<float*>(params.bias_gradient)[row] = is_empty ? 0.f : of_lse - sink_gradient;
  }
}

template <class T, int kIndex>
struct BackwardMemory {
  static constexpr AttentionBackwardTile kTile = kAttentionBackwardTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kKeys = kTile.keys(), kQueries = kTile.queries;
  static constexpr int kThreads = kTile.threads(), kSlice = kTile.slice;
  static constexpr int kSlices = kDim / kSlice, kStages = kDim > 128 ? 1 : 2;
  using Keys = Tile<T, kKeys, kDim>;
  using Queries = Tile<T, kQueries, kDim>;
  using Scores = Tile<T, kKeys, kQueries>;  // gradients of scores
  using Bias = Tile<T, kQueries, kKeys>;
  using FloatBias = FloatBiasTile<kQueries, kKeys>;

  static constexpr int kValues = Keys::kBytes, kQueriesAt = 2 * Keys::kBytes;
  static constexpr int kGradients = kQueriesAt + kStages * Queries::kBytes;
  static constexpr int kScores = kGradients + kStages * Queries::kBytes;
  static constexpr int kRows = kScores + Scores::kBytes;
  static constexpr int kBiasAt = kRows + 2 * kQueries * static_cast<int>(sizeof(RowOfBackward));
  static constexpr int bytes(BiasKind bias) {
    return kBiasAt + (bias == BiasKind::kTile  ? Bias::kBytes
                      : bias == BiasKind::kAny ? FloatBias::kBytes
                                               : 0);
  }
};

// Weights and gradients of the scores of this warp's 16 keys, in rows, and a tile of queries.
// Calls `between` when the queries and the keys are used up.
template <class T, BiasKind kBias, class Memory, int kN, class Between>
__device__ __forceinline__ void find_score_gradients(
    const AttentionParams& params, char* shared_memory, int stage, const RowOfBackward* rows,
    Excluded<1, kN>& excluded, Accumulators<1, kN>& weights, Accumulators<1, kN>& gradients,
    Between&& between) {
  using KeyTile = typename Memory::Keys;
  using QueryTile = typename Memory::Queries;
  using BiasTile = typename Memory::Bias;
  const uint32_t memory = shared_address(shared_memory);
  const KeyTile key_tile{memory}, value_tile{memory + Memory::kValues};
  const QueryTile query_tile{memory + Memory::kQueriesAt + stage};
  const QueryTile gradient_tile{memory + Memory::kGradients + stage};
  const int thread = thread_index_anew(), key = thread / 32 * 16;
  const RowOfBackward* const columns = rows + thread % 4 * 2;
  if constexpr (kBias == BiasKind::kTile) {
    using Fragments = TransposedFragments<BiasTile>;
    const Fragments fragments(BiasTile{memory + Memory::kBiasAt}, key);
    start_from_bias(weights, 1.f / params.rest, TileBias<T, Fragments>{fragments});
  } else if constexpr (kBias == BiasKind::kAny) {
    using FloatBias = typename Memory::FloatBias;
    const FloatBias tile{reinterpret_cast<float*>(shared_memory + Memory::kBiasAt),
                         params.is_relative};
    start_from_bias(weights, 1.f / params.rest, TransposedFloatBias<FloatBias>{tile, key});
  }
  multiply_rows<T, Memory::kDim>(weights, FragmentsDown<KeyTile>(key_tile, key),
                                 FragmentsAcross<QueryTile>(query_tile, 0));
  between();
  multiply_rows<T, Memory::kDim>(gradients, FragmentsDown<KeyTile>(value_tile, key),
                                 FragmentsAcross<QueryTile>(gradient_tile, 0));
  const float c = params.rest * kLog2E;
  bool is_finite = true;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowOfBackward row = columns[n * 8 + i % 2];
      weights[0][n][i] = exp2_approximate(fmaf(weights[0][n][i] - row.max, c, -row.log2_sum));
      gradients[0][n][i] = (gradients[0][n][i] - row.delta) * weights[0][n][i];
      is_finite = is_finite && fabsf(row.delta) < INFINITY;
    }
  }
  // Where a weight is 0 its score has no gradient, whatever that of the weight is. It is finite
  // where delta is.
  if (!is_finite) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (weights[0][n][i] == 0.f) gradients[0][n][i] = 0.f;
      }
    }
  }
  excluded.apply(weights, 0.f);
  excluded.apply(gradients, 0.f);
}

// To where all warps find them.
template <class T, class Memory, int kN>
__device__ inline void share_score_gradients(char* shared_memory,
                                             const Accumulators<1, kN>& gradients) {
  const int thread = thread_index_anew(), lane = thread % 32;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint32_t*>(
          shared_memory + Memory::kScores +
          Memory::Scores::offset(thread / 32 * 16 + half * 8 + lane / 4, n) + lane % 4 * 4) =
          round_pair<T>(gradients[0][n][2 * half], gradients[0][n][2 * half + 1]);
    }
  }
}

// The gradient of a bias that has an entry for each score, [..., queries, keys], of number `entry`
// of its heads. In float32, from a warp's 16 keys, in rows: eight lanes write, or add to, eight
// neighbours.
template <bool kAdds, int kN>
__device__ inline void store_bias_gradient(const AttentionBackwardParams& params,
                                           const Accumulators<1, kN>& gradients, int64_t entry,
                                           int first_query, int first_key) {
  float* const out =
      static_cast<float*>(params.bias_gradient) + entry * params.queries * params.keys;
  const int thread = thread_index_anew(), lane = thread % 32;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + thread / 32 * 16 + i / 2 * 8 + lane / 4;
      const int query = first_query + n * 8 + lane % 4 * 2 + i % 2;
      if (key >= params.keys || query >= params.queries) continue;
      float* const place = out + int64_t{query} * params.keys + key;
      if constexpr (kAdds) {
        atomicAdd(place, gradients[0][n][i]);
      } else {
        *place = gradients[0][n][i];
      }
    }
  }
}

// In 16 bits, from the block's tile: each warp 16 queries and 64 keys.
template <class T, class ScoreTile>
__device__ inline void store_bias_gradient(const AttentionBackwardParams& params,
                                           const ScoreTile& tile, int64_t entry, int first_query,
                                           int first_key) {
  T* const out = static_cast<T*>(params.bias_gradient) + entry * params.queries * params.keys;
  const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32;
  constexpr int kQueryBlocks = ScoreTile::kColumns / 16;
  const FragmentsAcross<ScoreTile> fragments(tile, 0);
  const bool has_pairs = params.keys % 2 == 0;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int row = warp % kQueryBlocks * 16, column = (warp / kQueryBlocks * 4 + block) * 16;
    uint32_t pairs[4];
    fragments.load_transposed(pairs, column, row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = first_query + row + i % 2 * 8 + lane / 4;
      const int key = first_key + column + i / 2 * 8 + lane % 4 * 2;
      if (query >= params.queries) continue;
      T* const pair = out + int64_t{query} * params.keys + key;
      if (has_pairs) {
        if (key < params.keys) *reinterpret_cast<uint32_t*>(pair) = pairs[i];
      } else {
        if (key < params.keys) pair[0] = reinterpret_cast<const T*>(pairs + i)[0];
        if (key + 1 < params.keys) pair[1] = reinterpret_cast<const T*>(pairs + i)[1];
      }
    }
  }
}

// Sums over queries of a warp's 16 keys; written with the last tile of a head.
template <int kN>
__device__ inline void add_to_key_sums(const AttentionBackwardParams& params,
                                       const Accumulators<1, kN>& gradients, float (&sums)[2],
                                       int batch, int head, int first_key, bool is_last) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i / 2] += gradients[0][n][i];
  }
  if (!is_last) return;
  const int thread = thread_index_anew(), lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = sums[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int key = first_key + thread / 32 * 16 + half * 8 + lane / 4;
    if (lane % 4 == 0 && key < params.keys)
      static_cast<float*>(
          params.bias_gradient)[(int64_t{batch} * params.heads + head) * params.keys + key] = sum;
    sums[half] = 0.f;
  }
}

// Sums along diagonals, each by one thread in one order. Each tile of keys has sums of its own:
// [batches, heads, tiles, kKeys - 1 + queries], of which number d is that of key - first key -
// query = d - (queries - 1).
template <class T, class ScoreTile>
__device__ inline void add_to_diagonals(const AttentionBackwardParams& params, const char* scores,
                                        int batch, int head, int tile, int first_query) {
  constexpr int kKeys = ScoreTile::kRows, kQueries = ScoreTile::kColumns;
  const int thread = thread_index_anew();
  const int64_t tiles = divide_up(params.keys, kKeys), diagonals = kKeys - 1 + params.queries;
  float* const sums = static_cast<float*>(params.bias_gradient) +
                      ((int64_t{batch} * params.heads + head) * tiles + tile) * diagonals;
  // Key - query inside the tile.
  const int distance = thread - (kQueries - 1);
  if (distance >= kKeys) return;
  float sum = 0.f;
  const int begin = max(distance, 0), end = min(distance + kQueries, kKeys);
  for (int key = begin; key < end; ++key) {
    const int query = key - distance;
    sum += to_float(
        *reinterpret_cast<const T*>(scores + ScoreTile::offset(key, query / 8) + query % 8 * 2));
  }
  const int64_t diagonal = distance - first_query + params.queries - 1;
  if (diagonal >= 0) sums[diagonal] += sum;
}

// dQ of a tile of queries from the block's keys: each warp makes some rows of some columns.
template <class T, class Memory>
__device__ __forceinline__ void add_to_query_gradient(const AttentionBackwardParams& params,
                                                      const char* shared_memory, int batch,
                                                      int head, int first_query, int slice) {
  using KeyTile = typename Memory::Keys;
  using ScoreTile = typename Memory::Scores;
  constexpr int kColumns = Memory::kSlice >= 64 ? 32 : 16, kColumnWarps = Memory::kSlice / kColumns;
  constexpr int kRows = Memory::kQueries * kColumnWarps / (Memory::kThreads / 32);
  static_assert(kRows % 16 == 0);
  const uint32_t memory = shared_address(shared_memory);
  const KeyTile key_tile{memory};
  const ScoreTile score_tile{memory + Memory::kScores};
  const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32;
  const int column = warp % kColumnWarps * kColumns + slice;
  const int first_row = warp / kColumnWarps * kRows;
  float gradients[kRows / 16][kColumns / 8][4] = {};
  multiply_transposed<T, Memory::kKeys>(gradients, FragmentsAcross<ScoreTile>(score_tile, 0),
                                        FragmentsDown<KeyTile>(key_tile, 0), first_row, column);
  float* const sums =
      params.query_gradient_sum +
      ((int64_t{batch} * params.heads + head) * params.queries + first_query) * params.head_dim;
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      if (first_query + row >= params.queries) continue;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        if (column + n * 8 < params.head_dim)
          add_to_global(sums + row * params.head_dim + column + n * 8 + lane % 4 * 2,
                        gradients[m][n][2 * half], gradients[m][n][2 * half + 1]);
      }
    }
  }
}

template <class T, BiasKind kBias, int kIndex>
__global__ void __launch_bounds__(kAttentionBackwardTiles[kIndex].threads(),
                                  kAttentionBackwardTiles[kIndex].blocks_per_sm)
    attention_backward_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using Memory = BackwardMemory<T, kIndex>;
  using KeyTile = typename Memory::Keys;
  using QueryTile = typename Memory::Queries;
  using ScoreTile = typename Memory::Scores;
  using BiasTile = typename Memory::Bias;
  constexpr int kThreads = Memory::kThreads, kSlice = Memory::kSlice;
  constexpr int kKeys = Memory::kKeys, kQueries = Memory::kQueries, kStages = Memory::kStages;
  constexpr int kN = kQueries / 8, kColumns = kSlice / 8;
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t memory = shared_address(shared_memory);
  const KeyTile key_tile{memory}, value_tile{memory + Memory::kValues};
  const QueryTile query_tile{memory + Memory::kQueriesAt};
  const QueryTile gradient_tile{memory + Memory::kGradients};
  const ScoreTile score_tile{memory + Memory::kScores};
  const BiasTile bias_tile{memory + Memory::kBiasAt};
  const typename Memory::FloatBias float_bias{
      reinterpret_cast<float*>(shared_memory + Memory::kBiasAt), params.is_relative};
  auto* const rows = reinterpret_cast<RowOfBackward*>(shared_memory + Memory::kRows);

  int first_key, key_head, batch, slice, begin, end, all_visible_begin, all_visible_end;
  {
    int tile;
    params.place(static_cast<int>(blockIdx.x), tile, key_head, batch);
    slice = tile % Memory::kSlices * kSlice;
    first_key = tile / Memory::kSlices * kKeys;
    const int last_key = min(first_key + kKeys, params.keys) - 1;
    const KeyRange first_from = visible_from(params, first_key),
                   last_from = visible_from(params, last_key);
    begin = first_from.begin / kQueries * kQueries;
    end = last_from.end;
    all_visible_begin = last_from.begin;
    all_visible_end = params.mask.data == nullptr && first_key + kKeys <= params.keys
                          ? min(first_from.end, params.queries) - kQueries
                          : -1;
  }
  {
    const auto copy = [&](const KeyTile& tile, const Strided& tensor, int columns) {
      tile.template start_copy<kThreads>(
          static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
              key_head * tensor.head_stride + first_key * tensor.query_stride,
          tensor.query_stride, params.keys - first_key, columns);
    };
    copy(key_tile, params.key, params.head_dim);
    copy(value_tile, params.value, params.value_dim);
  }
  const int group = static_cast<int>(params.heads_per_key_head.divisor);
  const int tiles_per_head = max(divide_up(end - begin, kQueries), 0);
  const int steps = tiles_per_head * group;

  const auto place_of = [&](int step, int& head, int& query) {
    const int of_group = step / tiles_per_head;
    head = key_head * group + of_group;
    query = begin + (step - of_group * tiles_per_head) * kQueries;
  };
  const auto copy_queries = [&](int step) {
    int head, query;
    place_of(step, head, query);
    const uint32_t stage = step % kStages * QueryTile::kBytes;
    const auto copy = [&](const QueryTile& tile, const Strided& tensor, int columns) {
      QueryTile{tile.address + stage}.template start_copy<kThreads>(
          static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
              head * tensor.head_stride + query * tensor.query_stride,
          tensor.query_stride, params.queries - query, columns);
    };
    copy(query_tile, params.query, params.head_dim);
    copy(gradient_tile, params.output_gradient, params.value_dim);
    const int thread = thread_index_anew();
    if (thread < kQueries) {
      const int64_t row = (int64_t{batch} * params.heads + head) * params.queries + query + thread;
      start_copy_of(shared_address(rows + step % 2 * kQueries + thread),
                    params.rows_of_backward + min(row, params.rows() - 1),
                    query + thread < params.queries ? 16 : 0);
    }
    end_copies();
  };
  const auto copy_bias = [&](int step) {
    int head, query;
    place_of(step, head, query);
    const BiasRows<T> bias(params, batch, head);
    if constexpr (kBias == BiasKind::kTile) {
      bias_tile.template start_copy<kThreads>(bias.row(query) + first_key, bias.query_stride,
                                              params.queries - query, params.keys - first_key);
      end_copies();
    } else if constexpr (kBias == BiasKind::kAny) {
      float_bias.template fill<kThreads>(bias, query, first_key, params.queries, params.keys);
    }
  };

  [[maybe_unused]] float key_sums[2] = {};  // of gradients of the bias
  float key_gradient[1][kColumns][4] = {}, value_gradient[1][kColumns][4] = {};
  if (steps > 0) {
    copy_queries(0);
    if constexpr (kBias != BiasKind::kNone) copy_bias(0);
    wait_for_copies();
    __syncthreads();
    if (kBias != BiasKind::kNone && params.power_of_two != 1.f)
      scale_rows<T, 16, KeyTile>(shared_memory, static_cast<int>(threadIdx.x) / 32 * 16,
                                 params.power_of_two);
  }

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for_copies();
    __syncthreads();  // this step's copies are there, the step before is done
    if (kStages > 1 && step + 1 < steps) copy_queries(step + 1);
    const uint32_t stage = step % kStages * QueryTile::kBytes;
    const QueryTile queries{query_tile.address + stage}, gradients{gradient_tile.address + stage};
    int head, query;
    place_of(step, head, query);

    Excluded<1, kN> excluded;
    if (query < all_visible_begin || query > all_visible_end)
      excluded.template find<true>(params, batch, head, query,
                                   first_key + thread_index_anew() / 32 * 16);
    float scores[1][kN][4] = {}, score_gradients[1][kN][4] = {};
    find_score_gradients<T, kBias, Memory>(params, shared_memory, stage, rows + step % 2 * kQueries,
                                           excluded, scores, score_gradients, [] {});
    share_score_gradients<T, Memory>(shared_memory, score_gradients);
    multiply_weights<T>(value_gradient, scores, FragmentsDown<QueryTile>(gradients, 0), slice);
    multiply_weights<T>(key_gradient, score_gradients, FragmentsDown<QueryTile>(queries, 0), slice);
    if constexpr (kBias != BiasKind::kNone) {
      if (slice == 0 && params.bias_gradient_kind == BiasGradient::kShared) {
        int bias_batch, bias_head, rest;
        params.batches_per_bias.split(batch, bias_batch, rest);
        params.heads_per_bias.split(head, bias_head, rest);
        const int64_t bias_heads = params.heads / params.heads_per_bias.divisor;
        store_bias_gradient<true>(params, score_gradients, bias_batch * bias_heads + bias_head,
                                  query, first_key);
      } else if (slice == 0 && params.bias_gradient_kind == BiasGradient::kKeys) {
        add_to_key_sums(params, score_gradients, key_sums, batch, head, first_key,
                        (step + 1) % tiles_per_head == 0);
      } else if (slice == 0 && params.bias_gradient_kind == BiasGradient::kDense &&
                 params.bias.type == DType::kFloat32) {
        store_bias_gradient<false>(params, score_gradients, int64_t{batch} * params.heads + head,
                                   query, first_key);
      }
    }
    __syncthreads();  // the gradients of scores are there, the bias is used up
    if constexpr (kBias != BiasKind::kNone) {
      if (slice == 0 && params.bias_gradient_kind == BiasGradient::kDense &&
          params.bias.type != DType::kFloat32) {
        store_bias_gradient<T>(params, score_tile, int64_t{batch} * params.heads + head, query,
                               first_key);
      } else if (slice == 0 && params.bias_gradient_kind == BiasGradient::kDiagonals) {
        add_to_diagonals<T, ScoreTile>(params, shared_memory + Memory::kScores, batch, head,
                                       first_key / kKeys, query);
      }
    }
    if constexpr (kBias != BiasKind::kNone) {
      if (step + 1 < steps) copy_bias(step + 1);
    }

    if (params.query_gradient_sum != nullptr)
      add_to_query_gradient<T, Memory>(params, shared_memory, batch, head, query, slice);
    if (kStages == 1 && step + 1 < steps) {
      __syncthreads();  // queries and gradients are used up
      copy_queries(step + 1);
    }
  }
  wait_for_copies();
  __syncthreads();

  // Through what held keys and values.
  const auto store = [&](int at, const float (&sums)[kColumns][4], float factor,
                         const Strided& tensor, int width) {
    store_rows<T, KeyTile>(
        shared_memory + at, thread_index_anew() / 32 * 16, sums, {factor, factor},
        static_cast<T*>(const_cast<void*>(tensor.data)) + batch * tensor.batch_stride +
            key_head * tensor.head_stride + first_key * tensor.query_stride + slice,
        tensor.query_stride, params.keys - first_key, width - slice);
  };
  store(0, key_gradient[0], params.scale, params.key_gradient, params.head_dim);
  store(Memory::kValues, value_gradient[0], 1.f, params.value_gradient, params.value_dim);
}

// dB of a bias that batches or heads share: a block owns a tile of 64 queries and some keys of it,
// and takes all that share it in turn, always in the same order.
template <class T, BiasKind kBias, int kIndex>
__global__ void __launch_bounds__(kAttentionBackwardTiles[kIndex].threads(),
                                  kAttentionBackwardTiles[kIndex].blocks_per_sm)
    attention_bias_gradient_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using Memory = BackwardMemory<T, kIndex>;
  using KeyTile = typename Memory::Keys;
  using QueryTile = typename Memory::Queries;
  constexpr int kThreads = Memory::kThreads, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  constexpr int kN = kQueries / 8;
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t memory = shared_address(shared_memory);
  auto* const rows = reinterpret_cast<RowOfBackward*>(shared_memory + Memory::kRows);

  int first_key, first_query, bias_head, bias_batch;
  {
    int tile;
    params.place(static_cast<int>(blockIdx.x), tile, bias_head, bias_batch);
    const int key_tiles = divide_up(params.keys, kKeys);
    first_key = tile % key_tiles * kKeys;
    first_query = tile / key_tiles * kQueries;
  }
  const int64_t entry =
      int64_t{bias_batch} * (params.heads / params.heads_per_bias.divisor) + bias_head;
  const int heads = static_cast<int>(params.heads_per_bias.divisor);
  const int members = heads * static_cast<int>(params.batches_per_bias.divisor);
  const auto place_of = [&](int member, int& head, int& batch) {
    batch = bias_batch * static_cast<int>(params.batches_per_bias.divisor) + member / heads;
    head = bias_head * heads + member % heads;
  };
  const int last_query = min(first_query + kQueries, params.queries) - 1;
  // Outside of a window nothing but 0 remains, which is there.
  if (visible_keys(params, last_query).end <= first_key ||
      visible_keys(params, first_query).begin >= first_key + kKeys)
    return;

  const auto copy = [&](int at, const Strided& tensor, int member, bool is_of_keys, int columns) {
    int head, batch, key_head, rest;
    place_of(member, head, batch);
    params.heads_per_key_head.split(head, key_head, rest);
    const int first = is_of_keys ? first_key : first_query;
    const T* const source = static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
                            (is_of_keys ? key_head : head) * tensor.head_stride +
                            first * tensor.query_stride;
    if (is_of_keys) {
      KeyTile{memory + at}.template start_copy<kThreads>(source, tensor.query_stride,
                                                         params.keys - first, columns);
    } else {
      QueryTile{memory + at}.template start_copy<kThreads>(source, tensor.query_stride,
                                                           params.queries - first, columns);
    }
  };
  const auto copy_keys_and_queries = [&](int member) {
    copy(0, params.key, member, true, params.head_dim);
    copy(Memory::kQueriesAt, params.query, member, false, params.head_dim);
    const int thread = thread_index_anew();
    if (thread < kQueries) {
      int head, batch;
      place_of(member, head, batch);
      const int64_t row =
          (int64_t{batch} * params.heads + head) * params.queries + first_query + thread;
      start_copy_of(shared_address(rows + member % 2 * kQueries + thread),
                    params.rows_of_backward + min(row, params.rows() - 1),
                    first_query + thread < params.queries ? 16 : 0);
    }
    end_copies();
  };
  const auto copy_values_and_gradients = [&](int member) {
    copy(Memory::kValues, params.value, member, true, params.value_dim);
    copy(Memory::kGradients, params.output_gradient, member, false, params.value_dim);
    end_copies();
  };

  {
    const BiasRows<T> bias(params, bias_batch * static_cast<int>(params.batches_per_bias.divisor),
                           bias_head * heads);
    if constexpr (kBias == BiasKind::kTile) {
      typename Memory::Bias{memory + Memory::kBiasAt}.template start_copy<kThreads>(
          bias.row(first_query) + first_key, bias.query_stride, params.queries - first_query,
          params.keys - first_key);
    } else {
      const typename Memory::FloatBias tile{
          reinterpret_cast<float*>(shared_memory + Memory::kBiasAt), params.is_relative};
      tile.template fill<kThreads>(bias, first_query, first_key, params.queries, params.keys);
    }
  }
  const bool is_all_inside =
      first_key + kKeys <= params.keys && first_query + kQueries <= params.queries &&
      params.mask.data == nullptr && visible_keys(params, first_query).end >= first_key + kKeys &&
      visible_keys(params, last_query).begin <= first_key;
  float sums[1][kN][4] = {};
  copy_keys_and_queries(0);
  copy_values_and_gradients(0);
#pragma unroll 1
  for (int member = 0; member < members; ++member) {
    wait_for_older_copies<1>();
    __syncthreads();  // keys and queries are there
    if (params.power_of_two != 1.f) {
      scale_rows<T, 16, KeyTile>(shared_memory, static_cast<int>(threadIdx.x) / 32 * 16,
                                 params.power_of_two);
      __syncwarp();
    }
    Excluded<1, kN> excluded;
    if (!is_all_inside) {
      int head, batch;
      place_of(member, head, batch);
      excluded.template find<true>(params, batch, head, first_query,
                                   first_key + thread_index_anew() / 32 * 16);
    }
    float scores[1][kN][4] = {}, gradients[1][kN][4] = {};
    find_score_gradients<T, kBias, Memory>(
        params, shared_memory, 0, rows + member % 2 * kQueries, excluded, scores, gradients, [&] {
          wait_for_copies();
          __syncthreads();  // values and gradients are there, keys and queries are used up
          if (member + 1 < members) copy_keys_and_queries(member + 1);
        });
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0][n][i] += gradients[0][n][i];
    }
    __syncthreads();  // values and gradients are used up
    if (member + 1 < members) copy_values_and_gradients(member + 1);
  }
  if (params.bias.type == DType::kFloat32) {
    store_bias_gradient<false>(params, sums, entry, first_query, first_key);
  } else {
    share_score_gradients<T, Memory>(shared_memory, sums);
    __syncthreads();
    store_bias_gradient<T>(params, typename Memory::Scores{memory + Memory::kScores}, entry,
                           first_query, first_key);
  }
}

// The gradient of a relative bias from sums of diagonals, an entry per thread.
static __global__ void __launch_bounds__(256)
    attention_diagonals_kernel(const __grid_constant__ AttentionBackwardParams params, int tile,
                               float* table) {
  const int entries = params.queries + params.keys - 1;
  const int64_t bias_heads = params.heads / params.heads_per_bias.divisor;
  const int64_t bias_batches = params.batches / params.batches_per_bias.divisor;
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= bias_batches * bias_heads * entries) return;
  const int64_t of_table = i / entries;
  const int entry = static_cast<int>(i - of_table * entries);
  const int64_t first_head = of_table % bias_heads * params.heads_per_bias.divisor;
  const int64_t first_batch = of_table / bias_heads * params.batches_per_bias.divisor;
  const int tiles = divide_up(params.keys, tile), diagonals = tile - 1 + params.queries;
  float sum = 0.f;
  for (int64_t batch = first_batch; batch < first_batch + params.batches_per_bias.divisor;
       ++batch) {
    for (int64_t head = first_head; head < first_head + params.heads_per_bias.divisor; ++head) {
      const float* const sums = static_cast<const float*>(params.bias_gradient) +
                                (batch * params.heads + head) * tiles * diagonals;
      for (int t = max(entry - diagonals + tile, 0) / tile; t < tiles && t * tile <= entry; ++t)
        sum += sums[int64_t{t} * diagonals + entry - t * tile];
    }
  }
  table[i] = sum;
}

// dQ from its sums, a chunk of 8 columns per thread.
template <class T>
__global__ void __launch_bounds__(256)
    attention_query_gradient_kernel(const __grid_constant__ AttentionBackwardParams params) {
  const int chunks = params.head_dim / 8;
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= params.rows() * chunks) return;
  const int64_t row = i / chunks, of_head = row / params.queries;
  const int column = static_cast<int>(i - row * chunks) * 8;
  const int query = static_cast<int>(row - of_head * params.queries);
  const float factor = params.scale / params.power_of_two;
  const float* const sums = params.query_gradient_sum + row * params.head_dim + column;
  float values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = sums[j] * factor;
  const Strided& tensor = params.query_gradient;
  auto* const out = static_cast<T*>(const_cast<void*>(tensor.data)) +
                    of_head / params.heads * tensor.batch_stride +
                    of_head % params.heads * tensor.head_stride + query * tensor.query_stride;
  *reinterpret_cast<Pack<T, 8>*>(out + column) = Pack<T, 8>::round(values);
}

}  // namespace megasoftmax
