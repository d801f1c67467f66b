#pragma once
// Attention of few queries and many keys, which is bound by reading keys and values.
//
// A warp owns 16 rows, the queries of all heads that share their keys, and takes every so many 16
// keys, through a ring of copies of its own, without a barrier. The warps of a block, and then the
// blocks among which the keys of a head are split, add up what they have. Keys and values are read
// once.

#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../exclusion.cuh"
#include "../layout.h"
#include "../online_softmax.cuh"
#include "../parts.cuh"
#include "tile.cuh"

namespace megasoftmax {

// A packed row: a query of one of the heads that share keys.
struct DecodeRow {
  int head, query;
  bool is_row;

  __device__ DecodeRow(const AttentionParams& params, int key_head, int row) {
    const int heads = static_cast<int>(params.heads_per_key_head.divisor);
    is_row = row < heads * params.queries;
    const int of_group = min(row / params.queries, heads - 1);
    head = key_head * heads + of_group;
    query = is_row ? row - of_group * params.queries : 0;
  }
};

// What the two rows of a lane see, from number `lane_row` and 8 further on; and the first and the
// last key that a row of the warp sees.
__device__ inline void find_visible(const AttentionForwardParams& params, int batch, int key_head,
                                    int lane_row, KeyRange (&visible)[2], int& first_seen,
                                    int& last_seen) {
  first_seen = params.keys;
  last_seen = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DecodeRow row(params, key_head, lane_row + row_offset(0, 2 * half));
    visible[half] = row.is_row ? visible_keys(params, batch, row.head, row.query) : KeyRange{0, 0};
    first_seen = min(first_seen, row.is_row ? visible[half].begin : params.keys);
    last_seen = max(last_seen, visible[half].end);
  }
  first_seen = min(max(smallest_of_lanes(first_seen), 0), params.keys);
  last_seen = largest_of_lanes(last_seen);
}

// Which pairs of these rows and of keys from `key` on are excluded, and their biases. An entry of
// the mask stands for `mask_block` queries and keys.
template <class T, bool kHasBias, int kN>
__device__ __forceinline__ void find_excluded(const AttentionForwardParams& params, int batch,
                                              int key_head, int lane_row, int key, int end,
                                              int mask_block, const KeyRange (&visible)[2],
                                              Excluded<1, kN>& excluded,
                                              Accumulators<1, kN>& biases) {
  const FirstElement mine(threadIdx.x);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DecodeRow row(params, key_head, lane_row + row_offset(0, 2 * half));
    const bool* const mask =
        params.mask.data == nullptr
            ? nullptr
            : params.mask.row<const bool>(batch, row.head, row.query / mask_block);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = key + mine.column + column_offset(n, i);
        const bool is_visible = column < end && visible[half].contains(column);
        if (!is_visible ||
            (mask != nullptr && mask[column / mask_block * params.mask.column_stride]))
          excluded.add(0, n, 2 * half + i);
        if constexpr (kHasBias) {
          const BiasRows<T> bias(params, batch, row.head);
          if (is_visible) biases[0][n][2 * half + i] = bias(row.query, column);
        }
      }
    }
  }
}

// Makes logits of products.
template <int kN>
__device__ __forceinline__ void add_biases(Accumulators<1, kN>& scores, float scale,
                                           const Accumulators<1, kN>& biases) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[0][n][i] = fmaf(scores[0][n][i], scale, biases[0][n][i]);
  }
}

// As many warps as the block has room for. Without parts it writes rows of the output.
template <class T, bool kHasBias, int kDim>
__global__ void __launch_bounds__(32 * max_decode_warps(kDim), decode_blocks_per_sm(kDim))
    attention_decode_kernel(const __grid_constant__ AttentionForwardParams params) {
  if (!kIsAmpere) return;
  using Rows = Tile<T, kDecodeKeys, kDim>;
  constexpr int kStages = kDecodeStages, kMaxWarps = max_decode_warps(kDim);
  constexpr DecodeLayout kLayout(kDim, kMaxWarps);
  constexpr int kColumns = kDim / 8, kN = kDecodeKeys / 8;
  extern __shared__ __align__(1024) char shared_memory[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const FirstElement mine(threadIdx.x);
  if (params.parts != nullptr) let_next_launch_begin();
  const bool is_cluster = params.parts == nullptr && params.splits > 1;
  int split, first_row, key_head, batch;
  {
    const int block = static_cast<int>(blockIdx.x);
    int row_tile;
    if (is_cluster) {
      params.order.place(block / params.splits, row_tile, key_head, batch);
      split = block % params.splits;
    } else {
      int tile;
      params.order.place(block, tile, key_head, batch);
      params.row_tiles.split(tile, split, row_tile);
    }
    first_row = row_tile * 16;
  }
  const int lane_row = first_row + mine.row;
  // What the rows of a lane see, and what of the keys that any row sees is this split's.
  KeyRange visible[2];
  int begin, end;
  {
    int first_seen, last_seen;
    find_visible(params, batch, key_head, lane_row, visible, first_seen, last_seen);
    const KeyRange part =
        part_of<kDecodeKeys>(params, {first_seen / kDecodeKeys * kDecodeKeys, last_seen}, split);
    begin = part.begin;
    end = part.end;
  }

  // Queries, as matrices `a`.
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DecodeRow row(params, key_head, lane_row + row_offset(0, 2 * half));
    const T* const source = params.query.row<const T>(batch, row.head, row.query);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int column = mine.column + column_offset(2 * step + right, 0);
        queries[step][2 * right + half] = row.is_row && column < params.head_dim
                                              ? *reinterpret_cast<const uint32_t*>(source + column)
                                              : 0;
      }
    }
  }

  const uint32_t ring = shared_address(shared_memory) + warp * kStages * kLayout.stage_bytes;
  const auto start_copy = [&](int step) {
    const int key = begin + (step * warps + warp) * kDecodeKeys;
    if (key < end) {
      const Rows keys{ring + step % kStages * kLayout.stage_bytes};
      const Rows values{keys.address + Rows::kBytes};
      const auto copy = [&](const Rows& tile, const Strided& tensor, int columns) {
        tile.start_copy_of_warp(tensor.row<const T>(batch, key_head, key), tensor.query_stride,
                                params.keys - key, columns);
      };
      copy(keys, params.key, params.head_dim);
      copy(values, params.value, params.value_dim);
    }
    end_copies();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) start_copy(step);

  float output[1][kColumns][4] = {};
  OnlineSoftmax<1> softmax(params.scale);
#pragma unroll 1
  for (int step = 0; begin + (step * warps + warp) * kDecodeKeys < end; ++step) {
    const int key = begin + (step * warps + warp) * kDecodeKeys;
    start_copy(step + kStages - 1);
    float scores[1][kN][4] = {};
    [[maybe_unused]] float biases[1][kN][4] = {};
    Excluded<1, kN> excluded;
    find_excluded<T, kHasBias>(params, batch, key_head, lane_row, key, end, 1, visible, excluded,
                               biases);
    wait_for_older_copies<kStages - 1>();
    __syncwarp();
    const Rows keys{ring + step % kStages * kLayout.stage_bytes};
    const FragmentsAcross<Rows> key_fragments(keys, 0);
    // In backward's order: both come to the same bits, however large the logits are.
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t pair[4];
      key_fragments.load(pair, 0, i * 16);
      multiply_add<T>(scores[0][0], queries[i], pair[0], pair[1]);
      multiply_add<T>(scores[0][1], queries[i], pair[2], pair[3]);
    }
    if constexpr (kHasBias) add_biases(scores, params.scale, biases);
    excluded.apply(scores, -INFINITY);
    softmax.template step<kHasBias>(scores, output);
    multiply_weights<T>(output, scores, FragmentsDown<Rows>(Rows{keys.address + Rows::kBytes}, 0));
    __syncwarp();  // the stage is used up
  }
  wait_for_copies();
  __syncthreads();

  // What the warps have of each row.
  constexpr int kPitch = kLayout.pitch;
  auto* const sums = reinterpret_cast<float*>(shared_memory);
  float* const ends = sums + warps * 16 * kPitch;  // largest logit and sum of weights
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + mine.row + row_offset(0, 2 * half);
    const float sum = sum_of_row(softmax.sum[0][half]);
    if (mine.column == 0) {
      ends[2 * row] = softmax.max[0][half];
      ends[2 * row + 1] = sum;
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
      *reinterpret_cast<float2*>(sums + row * kPitch + mine.column + column_offset(n, 0)) = {
          output[0][n][2 * half], output[0][n][2 * half + 1]};
  }
  __syncthreads();
  // total_of(column): sums of values times weights, of it and the next column.
  const auto store_row = [&](const DecodeRow& place, const PartEnd& end_of_row, auto&& total_of) {
    const RowEnd row_end(end_of_row.max, end_of_row.sum, sink_logit(params.sink, place.head),
                         params.can_exclude);
    if (lane == 0) row_end.store(params, params.row_index(batch, place.head, place.query));
    T* const out = params.output.row<T>(batch, place.head, place.query);
    for (int column = 2 * lane; column < params.value_dim; column += 64) {
      const float2 total = total_of(column);
      *reinterpret_cast<uint32_t*>(out + column) =
          round_pair<T>(total.x * row_end.factor, total.y * row_end.factor);
    }
  };
  for (int row = warp; row < 16; row += warps) {
    const DecodeRow place(params, key_head, first_row + row);
    if (!place.is_row) continue;
    float max = kLowest, sum = 0.f, shares[kMaxWarps];
#pragma unroll
    for (int i = 0; i < kMaxWarps; ++i) {
      if (i < warps) max = fmaxf(max, ends[2 * (i * 16 + row)]);
    }
#pragma unroll
    for (int i = 0; i < kMaxWarps; ++i) {
      if (i >= warps) continue;
      shares[i] = exp2_approximate((ends[2 * (i * 16 + row)] - max) * kLog2E);
      sum += ends[2 * (i * 16 + row) + 1] * shares[i];
    }
    const int64_t row_of_all = params.row_index(batch, place.head, place.query);
    const auto total_of = [&](int column) {
      float2 total = {};
#pragma unroll
      for (int i = 0; i < kMaxWarps; ++i) {
        if (i >= warps) continue;
        const float2 more =
            *reinterpret_cast<const float2*>(sums + (i * 16 + row) * kPitch + column);
        total.x += more.x * shares[i];
        total.y += more.y * shares[i];
      }
      return total;
    };
    if (params.parts != nullptr) {
      if (lane == 0) params.part_end(split, row_of_all) = {max, sum};
      float* const part = params.part(split, row_of_all);
      for (int column = 2 * lane; column < params.value_dim; column += 64)
        *reinterpret_cast<float2*>(part + column) = total_of(column);
    } else if (is_cluster) {
      // In the place of what the first warp has of the row.
      for (int column = 2 * lane; column < params.value_dim; column += 64)
        *reinterpret_cast<float2*>(sums + row * kPitch + column) = total_of(column);
      __syncwarp();  // all lanes have read the ends of all warps
      if (lane == 0) reinterpret_cast<float2*>(ends)[row] = {max, sum};
    } else {
      store_row(place, {max, sum}, total_of);
    }
  }
  if (!is_cluster) return;

  // What the blocks of the cluster have of each row, each of some of the keys.
  __syncwarp();
  arrive_at_cluster();
  wait_for_cluster();
  for (int row = warp * params.splits + split; row < 16; row += warps * params.splits) {
    const DecodeRow place(params, key_head, first_row + row);
    if (!place.is_row) continue;
    // All loads are on their way at once; those of the last block again take the place of others.
    const auto load_all = [&](float2(&loaded)[kMaxClusterOfSplits], const float* mine) {
#pragma unroll
      for (int i = 0; i < kMaxClusterOfSplits; ++i)
        loaded[i] =
            load_from_cluster(reinterpret_cast<const float2*>(mine), min(i, params.splits - 1));
    };
    float2 parts[kMaxClusterOfSplits];
    load_all(parts, ends + 2 * row);
    float max = kLowest, sum = 0.f, shares[kMaxClusterOfSplits];
#pragma unroll
    for (const float2& part : parts) max = fmaxf(max, part.x);
#pragma unroll
    for (int i = 0; i < kMaxClusterOfSplits; ++i) {
      shares[i] = exp2_approximate((parts[i].x - max) * kLog2E);
      if (i < params.splits) sum += parts[i].y * shares[i];
    }
    store_row(place, {max, sum}, [&](int column) {
      float2 of_blocks[kMaxClusterOfSplits], total = {};
      load_all(of_blocks, sums + row * kPitch + column);
#pragma unroll
      for (int i = 0; i < kMaxClusterOfSplits; ++i) {
        if (i >= params.splits) continue;
        total.x += of_blocks[i].x * shares[i];
        total.y += of_blocks[i].y * shares[i];
      }
      return total;
    });
  }
  __syncwarp();
  arrive_at_cluster();  // what others read is there until all have read it
  wait_for_cluster();
}

}  // namespace megasoftmax
