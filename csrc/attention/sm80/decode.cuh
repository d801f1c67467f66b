#pragma once
// Attention of few queries and many keys, which is bound by reading keys and values.
//
// A warp owns 16 rows, the queries of all heads that share keys. It takes 16 keys at a time through
// its own ring of copies, without a barrier. The warps of a block add up their results, and so do
// the blocks among which the keys of a head are split. Keys and values are read once.

#include "../../common/grid.cuh"
#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../exclusion.cuh"
#include "../layout.h"
#include "../online_softmax.cuh"
#include "../parts.cuh"
#include "../softcap.cuh"
#include "tile.cuh"

namespace megasoftmax {

// A packed row: a query of one of the heads that share keys.
struct DecodeRow {
  int head, query;
  bool is_row;

  __device__ DecodeRow(const AttentionParams& params, int key_head, int row) {
    const int heads = static_cast<int>(params.heads_per_key_head.divisor);
    is_row = row < heads * params.queries;
    const int of_group = min(params.queries == 1 ? row : row / params.queries, heads - 1);
    head = key_head * heads + of_group;
    query = is_row ? row - of_group * params.queries : 0;
  }
};

// The keys that the two rows of a lane see, row `lane_row` and the row 8 further; and for all rows
// of the warp, the keys that some row sees, and those that all see.
__device__ inline void find_visible(const AttentionForwardParams& params, int batch, int key_head,
                                    int lane_row, KeyRange (&visible)[2], KeyRange& seen,
                                    KeyRange& seen_by_all) {
  seen = seen_by_all = visible[0] = visible[1] = {0, params.keys};
  if (params.window_left < 0 && params.window_right < 0 && !params.visible.are_given()) return;
  seen = {params.keys, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DecodeRow row(params, key_head, lane_row + row_offset(0, 2 * half));
    if (!row.is_row) continue;
    visible[half] = visible_keys(params, batch, row.head, row.query);
    seen = {min(seen.begin, visible[half].begin), max(seen.end, visible[half].end)};
    seen_by_all = {max(seen_by_all.begin, visible[half].begin),
                   min(seen_by_all.end, visible[half].end)};
  }
  seen = {min(max(smallest_of_lanes(seen.begin), 0), params.keys), largest_of_lanes(seen.end)};
  seen_by_all = {largest_of_lanes(seen_by_all.begin), smallest_of_lanes(seen_by_all.end)};
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
    const bool* const mask = params.mask.data == nullptr
                                 ? nullptr
                                 : params.mask_row(batch, row.head, row.query / mask_block);
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

// Turns scores into logits.
template <int kN>
__device__ __forceinline__ void add_biases(Accumulators<1, kN>& scores, float scale,
                                           const Accumulators<1, kN>& biases) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[0][n][i] = fmaf(scores[0][n][i], scale, biases[0][n][i]);
  }
}

// The end of a row whose parts have some of the keys each. A lane knows one part.
struct PartsOfRow {
  float max, sum;

  __device__ explicit PartsOfRow(const PartEnd& mine)
      : max(warp_max<32>(mine.max)), share_(exp2_approximate((mine.max - max) * kLog2E)) {
    sum = warp_sum<32>(mine.sum * share_);
  }
  // Adds a part, by all lanes of the warp.
  __device__ void add(float4& total, int part, const float4& more) const {
    const float share = __shfl_sync(~0u, share_, part);
    total.x += more.x * share;
    total.y += more.y * share;
    total.z += more.z * share;
    total.w += more.w * share;
  }

 private:
  float share_;
};

// Calls body(column, is_column) for every fourth column, by all lanes of a warp equally often.
// Lanes without a column pass the first one.
template <class Body>
__device__ __forceinline__ void for_columns(int columns, Body&& body) {
  const int mine = static_cast<int>(threadIdx.x) % 32 * 4;
#pragma unroll 1
  for (int first = 0; first < columns; first += 128) {
    const int column = first + mine;
    body(column < columns ? column : 0, column < columns);
  }
}

// Without `parts` it writes rows of the output, and several splits are a cluster. With them the
// blocks wait for each other.
template <class T, bool kHasBias, int kDim>
__global__ void __launch_bounds__(32 * decode_warps(kDim), kDecodeBlocksPerSm)
    attention_decode_kernel(const __grid_constant__ AttentionForwardParams params) {
  if (!kIsAmpere) return;
  using Rows = Tile<T, kDecodeKeys, kDim>;
  constexpr int kStages = kDecodeStages, kWarps = decode_warps(kDim);
  constexpr DecodeLayout kLayout(kDim);
  constexpr int kColumns = kDim / 8, kN = kDecodeKeys / 8;
  extern __shared__ __align__(1024) char shared_memory[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const FirstElement mine(threadIdx.x);
  const bool is_cluster = params.parts == nullptr && params.splits > 1;
  const int split = params.splits > 1 ? static_cast<int>(blockIdx.x) : 0;
  int first_row, key_head, batch;
  {
    const unsigned block = params.splits > 1 ? blockIdx.y : blockIdx.x;
    int row_tile;
    params.order.place(static_cast<int>(block), row_tile, key_head, batch);
    first_row = row_tile * 16;
  }
  const int lane_row = first_row + mine.row;
  // What the rows of a lane see, and the part of this split of the keys that any row sees.
  KeyRange visible[2], whole;  // the keys of the split that are seen by all rows
  int begin, end;
  {
    KeyRange seen;
    find_visible(params, batch, key_head, lane_row, visible, seen, whole);
    const KeyRange part =
        part_of<kDecodeKeys>(params, {seen.begin / kDecodeKeys * kDecodeKeys, seen.end}, split);
    begin = part.begin;
    end = part.end;
    whole.end = min(whole.end, end);
    if (params.mask.data != nullptr) whole.end = 0;
  }

  // A lane copies the same 16-byte vector of every n-th row of keys and of values.
  const uint32_t ring = shared_address(shared_memory) + warp * kStages * kLayout.stage_bytes;
  constexpr int kRowsAtATime = 32 / Rows::kVectors;
  const int first_of_lane = lane / Rows::kVectors, column_of_lane = lane % Rows::kVectors * 8;
  const auto source_of = [&](const Strided& tensor) {
    return tensor.row<const T>(batch, key_head, begin + warp * kDecodeKeys + first_of_lane) +
           column_of_lane;
  };
  const T* key_source = source_of(params.key);
  const T* value_source = source_of(params.value);
  const bool is_dense = params.head_dim == kDim && params.value_dim == kDim;
  const auto start_copy_of_step = [&](int step) {
    const int key = begin + (step * kWarps + warp) * kDecodeKeys;
    if (key < end) {
      const uint32_t stage = ring + step % kStages * kLayout.stage_bytes;
      const bool is_whole = is_dense && key + kDecodeKeys <= params.keys;
      const auto copy = [&](uint32_t tile, const T*& source, const Strided& tensor, int columns) {
        const auto place_of = [&](int i) {
          return tile + Rows::offset(first_of_lane + i, column_of_lane / 8);
        };
        const T* row = source;
        if (is_whole) {
#pragma unroll
          for (int i = 0; i < kDecodeKeys;
               i += kRowsAtATime, row += kRowsAtATime * tensor.query_stride)
            start_copy(place_of(i), row);
        } else {
#pragma unroll 1
          for (int i = 0; i < kDecodeKeys;
               i += kRowsAtATime, row += kRowsAtATime * tensor.query_stride) {
            const bool is_inside =
                key + first_of_lane + i < params.keys && column_of_lane < columns;
            start_copy_of(place_of(i), is_inside ? row : static_cast<const T*>(tensor.data),
                          is_inside ? 16 : 0);
          }
        }
        source += kWarps * kDecodeKeys * tensor.query_stride;
      };
      copy(stage, key_source, params.key, params.head_dim);
      copy(stage + Rows::kBytes, value_source, params.value, params.value_dim);
    }
    end_copies();
  };
#pragma unroll 1
  for (int step = 0; step < kStages; ++step) start_copy_of_step(step);

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

  float output[1][kColumns][4] = {};
  OnlineSoftmax<1> softmax(params.logit_scale);
#pragma unroll 1
  for (int step = 0; begin + (step * kWarps + warp) * kDecodeKeys < end; ++step) {
    const int key = begin + (step * kWarps + warp) * kDecodeKeys;
    float scores[1][kN][4] = {};
    [[maybe_unused]] float biases[1][kN][4] = {};
    Excluded<1, kN> excluded;
    if (kHasBias || key < whole.begin || key + kDecodeKeys > whole.end)
      find_excluded<T, kHasBias>(params, batch, key_head, lane_row, key, end, 1, visible, excluded,
                                 biases);
    wait_for_older_copies<kStages - 1>();
    __syncwarp();
    const Rows keys{ring + step % kStages * kLayout.stage_bytes};
    const FragmentsAcross<Rows> key_fragments(keys, 0);
    // The order of products is the backward's: both get the same bits, however large the logits
    // are.
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t pair[4];
      key_fragments.load(pair, 0, i * 16);
      multiply_add<T>(scores[0][0], queries[i], pair[0], pair[1]);
      multiply_add<T>(scores[0][1], queries[i], pair[2], pair[3]);
    }
    if (params.softcap.is_given()) cap_products<T>(params, scores);
    if constexpr (kHasBias) add_biases(scores, params.logit_scale, biases);
    excluded.apply(scores, -INFINITY);
    softmax.template step<kHasBias>(scores, output);
    multiply_weights<T>(output, scores, FragmentsDown<Rows>(Rows{keys.address + Rows::kBytes}, 0));
    __syncwarp();  // the stage is used up
    start_copy_of_step(step + kStages);
  }
  wait_for_copies();
  __syncthreads();

  // The results of the warps for each row. The last of 16 rows may be missing.
  const int rows = static_cast<int>(params.heads_per_key_head.divisor) * params.queries - first_row;
  constexpr int kPitch = kLayout.pitch;
  auto* const sums = reinterpret_cast<float*>(shared_memory);
  auto* const ends = reinterpret_cast<PartEnd*>(sums + kWarps * 16 * kPitch);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + mine.row + row_offset(0, 2 * half);
    const float sum = sum_of_row(softmax.sum[0][half]);
    if (mine.row + row_offset(0, 2 * half) >= rows) continue;
    if (mine.column == 0) ends[row] = {softmax.max[0][half], sum};
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
      *reinterpret_cast<float2*>(sums + row * kPitch + mine.column + column_offset(n, 0)) = {
          output[0][n][2 * half], output[0][n][2 * half + 1]};
  }
  __syncthreads();
  // total_of(column): sums of values times weights, for it and the next three columns.
  const auto store_row = [&](const DecodeRow& place, const PartEnd& end_of_row, auto&& total_of) {
    const RowEnd row_end =
        RowEnds(params, batch, place.head).of(place.query, end_of_row.max, end_of_row.sum);
    if (lane == 0) row_end.store(params, params.row_index(batch, place.head, place.query));
    T* const out = params.output.row<T>(batch, place.head, place.query);
    for_columns(params.value_dim, [&](int column, bool is_column) {
      const float4 total = total_of(column);
      const float factor = row_end.factor;
      if (is_column)
        *reinterpret_cast<Pack<T, 4>*>(out + column) = Pack<T, 4>::round(
            {total.x * factor, total.y * factor, total.z * factor, total.w * factor});
    });
  };
  for (int row = warp; row < min(rows, 16); row += kWarps) {
    const DecodeRow place(params, key_head, first_row + row);
    // Lane i has the end of warp i.
    const PartsOfRow of_warps(lane < kWarps ? ends[lane * 16 + row] : PartEnd{kLowest, 0.f});
    const int64_t row_of_all = params.row_index(batch, place.head, place.query);
    const auto total_of = [&](int column) {
      float4 total = {};
#pragma unroll 4
      for (int i = 0; i < kWarps; ++i)
        of_warps.add(total, i,
                     *reinterpret_cast<const float4*>(sums + (i * 16 + row) * kPitch + column));
      return total;
    };
    const auto keep_total = [&](float* kept) {
      for_columns(params.value_dim, [&](int column, bool is_column) {
        const float4 total = total_of(column);
        if (is_column) *reinterpret_cast<float4*>(kept + column) = total;
      });
    };
    const PartEnd end_of_row = {of_warps.max, of_warps.sum};
    if (params.parts != nullptr) {
      if (lane == 0) params.part_end(split, row_of_all) = end_of_row;
      keep_total(params.part(split, row_of_all));
    } else if (is_cluster) {
      keep_total(sums + row * kPitch);  // in the place of what the first warp has of the row
      __syncwarp();                     // all lanes have read the ends of all warps
      if (lane == 0) ends[row] = end_of_row;
    } else {
      store_row(place, end_of_row, total_of);
    }
  }
  if (params.parts != nullptr) {
    sync_grid();
    const unsigned number = blockIdx.y * gridDim.x + blockIdx.x;
    for (int64_t row = number; row < params.rows(); row += gridDim.x * gridDim.y) {
      add_parts<T>(params, row, true, warp, kWarps, reinterpret_cast<float4*>(shared_memory));
      __syncthreads();
    }
  }
  if (!is_cluster) return;

  // The results of the blocks of the cluster for each row.
  __syncwarp();
  arrive_at_cluster();
  wait_for_cluster();
  for (int row = warp * params.splits + split; row < min(rows, 16); row += kWarps * params.splits) {
    const DecodeRow place(params, key_head, first_row + row);
    PartEnd mine{kLowest, 0.f};
    if (lane < params.splits) {
      const float2 end = load_from_cluster<float2>(ends + row, lane);
      mine = {end.x, end.y};
    }
    const PartsOfRow of_blocks(mine);
    store_row(place, {of_blocks.max, of_blocks.sum}, [&](int column) {
      float4 total = {};
      // All loads are in flight at once. The last block is loaded again where there are fewer
      // blocks.
      float4 loaded[kMaxClusterOfSplits];
#pragma unroll
      for (int i = 0; i < kMaxClusterOfSplits; ++i)
        loaded[i] =
            load_from_cluster<float4>(sums + row * kPitch + column, min(i, params.splits - 1));
#pragma unroll
      for (int i = 0; i < kMaxClusterOfSplits; ++i) {
        if (i < params.splits) of_blocks.add(total, i, loaded[i]);
      }
      return total;
    });
  }
  __syncwarp();
  arrive_at_cluster();  // what others read is there until all have read it
  wait_for_cluster();
}

}  // namespace megasoftmax
