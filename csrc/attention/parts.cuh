#pragma once
// Rows whose keys are split among blocks: what a block leaves in the workspace, and how parts are
// added up.

#include "../common/vector.cuh"
#include "exclusion.cuh"
#include "fragments.cuh"
#include "online_softmax.cuh"
#include "params.h"

namespace megasoftmax {

// The keys of a split, of those that are seen. All splits but the last have whole steps.
template <int kStep>
__device__ inline KeyRange part_of(const AttentionForwardParams& params, KeyRange seen, int split) {
  if (params.splits == 1) return seen;
  const int steps = divide_up(max(seen.end - seen.begin, 0), kStep);
  const int keys = divide_up(steps, params.splits) * kStep;
  const int begin = seen.begin + split * keys;
  return {begin, min(begin + keys, seen.end)};
}

// Stores a warp's part of 16 rows. The lane's first row is `row`, which is query `query`.
template <int kN>
__device__ inline void store_parts(const AttentionForwardParams& params, int split, int64_t row,
                                   int query, const float (&output)[kN][4], const float (&max)[2],
                                   const float (&sum)[2]) {
  const FirstElement mine;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int offset = row_offset(0, 2 * half);
    const float total = sum_of_row(sum[half]);
    if (query + offset >= params.queries) continue;
    if (mine.column == 0) params.part_end(split, row + offset) = {max[half], total};
    float* const part = params.part(split, row + offset);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int column = mine.column + column_offset(n, 0);
      if (column < params.value_dim)
        *reinterpret_cast<float2*>(part + column) = {output[n][2 * half], output[n][2 * half + 1]};
    }
  }
}

// Adds up the parts of a row, by `warps` warps of a block, where this is number `warp`. All threads
// of the block call it together, and warps without a row pass any row. `totals`: shared memory of
// these warps, [warps, value_dim] floats.
template <class T>
__device__ inline void add_parts(const AttentionForwardParams& params, int64_t row, bool is_row,
                                 int warp, int warps, float4* totals) {
  constexpr int kColumns = 4, kLanes = 32;  // a lane's columns at a time
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int vectors = params.value_dim / kColumns;
  // Loads of the first 16-byte vector start before the shares are known: as many parts as most
  // warps have.
  constexpr int kAhead = 4;
  const auto part_of_vector = [&](int split, int vector) {
    return *reinterpret_cast<const float4*>(params.part(split, row) + vector * kColumns);
  };
  float4 ahead[kAhead] = {};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int split = warp + i * warps;
    if (split < params.splits && lane < vectors) ahead[i] = part_of_vector(split, lane);
  }

  float max = kLowest, sum = 0.f;
  for (int split = lane; split < params.splits; split += kLanes)
    max = fmaxf(max, params.part_end(split, row).max);
  max = warp_max<kLanes>(max);
  const auto share_of = [&](const PartEnd& end) {
    return exp2_approximate((end.max - max) * kLog2E);
  };
  for (int split = lane; split < params.splits; split += kLanes) {
    const PartEnd end = params.part_end(split, row);
    sum += end.sum * share_of(end);
  }
  sum = warp_sum<kLanes>(sum);

  for (int vector = lane; vector < vectors; vector += kLanes) {
    float4 total = {};
    const auto add = [&](int split, const float4& part) {
      const float share = share_of(params.part_end(split, row));
      total.x += part.x * share;
      total.y += part.y * share;
      total.z += part.z * share;
      total.w += part.w * share;
    };
    int split = warp;
    if (vector == lane) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i, split += warps) {
        if (split < params.splits) add(split, ahead[i]);
      }
    }
#pragma unroll 4
    for (; split < params.splits; split += warps) add(split, part_of_vector(split, vector));
    totals[warp * vectors + vector] = total;
  }
  __syncthreads();
  if (warp != 0 || !is_row) return;
  const int64_t of_all = row / params.queries;
  const int query = static_cast<int>(row - of_all * params.queries);
  const int64_t batch = of_all / params.heads;
  const int head = static_cast<int>(of_all - batch * params.heads);
  const RowEnd row_end = RowEnds(params, batch, head).of(query, max, sum);
  if (lane == 0) row_end.store(params, row);
  const float factor = row_end.factor * params.dropout.factor;
  T* const out = params.output.row<T>(batch, head, query);
  for (int vector = lane; vector < vectors; vector += kLanes) {
    float4 total = totals[vector];
    for (int other = 1; other < warps; ++other) {
      const float4 more = totals[other * vectors + vector];
      total.x += more.x;
      total.y += more.y;
      total.z += more.z;
      total.w += more.w;
    }
    *reinterpret_cast<Pack<T, kColumns>*>(out + vector * kColumns) = Pack<T, kColumns>::round(
        {total.x * factor, total.y * factor, total.z * factor, total.w * factor});
  }
}

// Adds up the parts of all rows. The number of warps of a row depends on the number of parts.
template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    attention_combine_kernel(const __grid_constant__ AttentionForwardParams params) {
  if (!kIsAmpere) return;
  extern __shared__ __align__(1024) char shared_memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = combine_warps(params.splits);
  const int64_t number = int64_t{blockIdx.x} * (kCombineThreads / 32 / warps) + warp / warps;
  wait_for_launch_before();
  add_parts<T>(
      params, min(number, params.rows() - 1), number < params.rows(), warp % warps, warps,
      reinterpret_cast<float4*>(shared_memory) + warp / warps * warps * (params.value_dim / 4));
}

}  // namespace megasoftmax
