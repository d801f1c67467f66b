#pragma once
// Row work of the backward pass. Before blocks of keys: RowOfBackward, PairOfRows, gradients of the
// options of the logits, and zeros to add dQ to. After them: dQ from its sums. Launches do it for
// all rows, or for the first and the last sections, see sm90/backward/row_worker.cuh.

#include "../common/reduce.cuh"
#include "../common/vector.cuh"
#include "online_softmax.cuh"
#include "params.h"

namespace megasoftmax {

inline constexpr int kThreadsOfRows = 256;

// Stores RowOfBackward and PairOfRows of a row, and its gradients of the options of the logits.
// `largest`, `log_sum`: statistics of the row. `delta`: rowsum(dO O). Called by one lane.
__device__ __forceinline__ void store_row_of_backward(const AttentionBackwardParams& params,
                                                      int64_t batch, int head, int query,
                                                      int64_t row, float largest, float log_sum,
                                                      float delta) {
  const RowEnds ends(params, batch, head);
  const float max = largest - ends.bias_of(query);
  if (params.lse_gradient != nullptr) delta -= params.lse_gradient[row];
  const bool is_empty = log_sum == -INFINITY;
  const float log2_sum = log_sum * kLog2E;
  const float offset = is_empty ? INFINITY : fmaf(max, kLog2E, log2_sum);
  const bool takes_offset = is_empty || !params.are_linear() || fabsf(offset) <= kMostOffset;
  const bool is_offset = takes_offset && params.pairs_of_rows != nullptr;
  // One store of 16 bytes, so that memory gets whole sectors.
  static_assert(sizeof(RowOfBackward) == sizeof(float4));
  reinterpret_cast<float4*>(params.rows_of_backward)[row] =
      make_float4(is_offset ? 0.f : max, is_offset || is_empty ? offset : log2_sum, delta, 0.f);
  if (params.pairs_of_rows != nullptr) {
    PairOfRows& pair = params.pairs_of_rows[params.pair_index(batch, head, query)];
    pair.offsets[query % 2] = takes_offset ? offset : NAN;
    pair.deltas[query % 2] = delta;
    if (query == params.queries - 1 && query % 2 == 0) {
      pair.offsets[1] = INFINITY;
      pair.deltas[1] = 0.f;
    }
  }
  const float beside_keys = ends.store_gradient(params, row, delta);
  // All logits of a row together have the gradient of the log-sum-exp; NaN where delta is not
  // finite.
  if (params.bias_gradient_kind == BiasGradient::kQueries) {
    const float of_lse = params.lse_gradient == nullptr ? 0.f : params.lse_gradient[row];
    static_cast<float*>(params.bias_gradient)[row] =
        is_empty ? 0.f : of_lse - beside_keys + 0.f * delta;
  }
}

// Pairs beyond the last query of a head: weights are 0. Called by kLanes lanes.
template <int kLanes>
__device__ __forceinline__ void end_pairs(const AttentionBackwardParams& params, int64_t batch,
                                          int head, int lane) {
  if (params.pairs_of_rows == nullptr) return;
  PairOfRows* const pairs = params.pairs_of_rows + params.pair_index(batch, head, 0);
  for (int i = (params.queries + 1) / 2 + lane; i < params.pairs_of_head(); i += kLanes)
    pairs[i] = {{INFINITY, INFINITY}, {0.f, 0.f}};
}

// Row `number` of all rows, or, with row workers, of those from `first_section` on.
struct RowOfLaunch {
  int64_t row, batch;
  int head, query;

  __device__ RowOfLaunch(const AttentionBackwardParams& params, int64_t number, int first_section) {
    int64_t of_head;
    if (params.sections_apart == 0) {
      row = number;
      of_head = row / params.queries;
      head = static_cast<int>(of_head % params.heads);
      batch = of_head / params.heads;
      query = static_cast<int>(row - of_head * params.queries);
      return;
    }
    of_head = number / params.queries;
    query = static_cast<int>(number - of_head * params.queries);
    int of_batch;
    params.place_of_head(first_section, static_cast<int>(of_head), head, of_batch);
    batch = of_batch;
    row = params.row_index(of_batch, head, query);
  }
};

// Row work before blocks of keys, kLanes lanes for a row.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreadsOfRows)
    attention_rows_kernel(const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  let_next_launch_begin();  // that of whole heads
  constexpr int kRows = kThreadsOfRows / kLanes;
  const int64_t begin = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes;
  if (params.sections_apart != 0) {
    const int64_t threads = int64_t{gridDim.x} * kThreadsOfRows;
    for (int64_t i = int64_t{blockIdx.x} * kThreadsOfRows + threadIdx.x; i < 2 * params.sections();
         i += threads)
      params.section_counts[i] = 0;
  }
  // Lanes beyond the last row take part in the sums of a warp.
  const int64_t number = min(begin, params.rows_of_launches() - 1);
  const auto [row, batch, head, query] = RowOfLaunch(params, number, 0);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto row_of = [&](const Strided& tensor) {
    return tensor.row<const T>(batch, head, query);
  };
  // Loaded here, so that they arrive with what follows.
  const float largest = params.statistics[row], log_sum = params.statistics[params.rows() + row];
  float delta = 0.f;
  if (lane * 8 < params.value_dim) {
    const auto output = load_pack<T, 8, true>(row_of(params.output) + lane * 8);
    const auto gradient = load_pack<T, 8, true>(row_of(params.output_gradient) + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) delta = fmaf(output[i], gradient[i], delta);
  }
  delta = warp_sum<kLanes>(delta);
  if (begin != number) return;
  if (params.query_gradient_sum != nullptr &&
      params.query_gradient_kind != QueryGradient::kWritten) {
    for (int i = 0; i < params.query_sums; ++i) {
      float* const sums = params.query_gradient_sum + (i * params.rows() + row) * params.head_dim;
      for (int column = lane * 4; column < params.head_dim; column += kLanes * 4)
        *reinterpret_cast<float4*>(sums + column) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  if (query == params.queries - 1) end_pairs<kLanes>(params, batch, head, lane);
  if (lane == 0) store_row_of_backward(params, batch, head, query, row, largest, log_sum, delta);
}

// dQ from its sums, 8 columns per thread. Those of several tiles of keys are added in order.
template <class T>
__global__ void __launch_bounds__(256)
    attention_query_gradient_kernel(const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  const int vectors = params.head_dim / 8;
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= params.rows_of_launches() * vectors) return;
  const int64_t number = i / vectors;
  const int column = static_cast<int>(i - number * vectors) * 8;
  const auto [row, batch, head, query] =
      RowOfLaunch(params, number, params.sections() - params.sections_apart);
  // They are added up in the L2 cache, and no launch since the zeros has read them. So the
  // first-level cache has none, though wait_for_launch_before comes later.
  const float* sums = params.query_gradient_sum + row * params.head_dim + column;
  float values[8] = {};
  for (int part = 0; part < params.query_sums; ++part, sums += params.rows() * params.head_dim) {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] += sums[j];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] *= params.scale;
  T* const out = params.query_gradient.row<T>(batch, head, query);
  *reinterpret_cast<Pack<T, 8>*>(out + column) = Pack<T, 8>::round(values);
  wait_for_launch_before();
}

}  // namespace megasoftmax
