#pragma once
// dQ = scale * dS K, in the same order each time. A block owns a tile of queries and takes one tile
// of keys after the other. It computes scores again.

#include "backward.cuh"

namespace megasoftmax {

inline constexpr int kInOrderThreads = 2 * kInOrderQueries;  // 16 queries a warp

template <class T, BiasKind kBias, int kDim, int kKeys>
__global__ void __launch_bounds__(kInOrderThreads) attention_query_gradient_in_order_kernel(
    const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  constexpr int kQueries = kInOrderQueries, kThreads = kInOrderThreads;
  static_assert(kQueries == kMaskTile && kMaskTile % kKeys == 0);
  constexpr InOrderLayout kLayout(kDim, kKeys, kBias, sizeof(T));
  using QueryTile = Tile<T, kQueries, kDim>;
  using KeyTile = Tile<T, kKeys, kDim>;
  constexpr int kN = kKeys / 8, kColumns = kDim / 8;
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t memory = shared_address(shared_memory);
  const QueryTile query_tile{memory}, gradient_tile{memory + kLayout.gradients};
  const KeyTile key_tile{memory + kLayout.keys}, value_tile{memory + kLayout.values};
  const SharedBias<T, kBias, kQueries, kKeys> bias{params, shared_memory + kLayout.bias};

  int head, batch, first_query, key_head;
  {
    int tile, rest;
    params.order.place(static_cast<int>(blockIdx.x), tile, head, batch);
    params.heads_per_key_head.split(head, key_head, rest);
    first_query = tile * kQueries;
  }
  const int last_query = min(first_query + kQueries, params.queries) - 1;
  const KeyRange first_sees = visible_keys(params, first_query),
                 last_sees = visible_keys(params, last_query);
  const auto copy = [&](const auto& tile, const Strided& tensor, int of_head, int first, int rows,
                        int columns) {
    tile.template start_copy<kThreads>(tensor.row<const T>(batch, of_head, first),
                                       tensor.query_stride, rows - first, columns);
  };
  copy(query_tile, params.query, head, first_query, params.queries, params.head_dim);
  copy(gradient_tile, params.output_gradient, head, first_query, params.queries, params.value_dim);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const FirstElement mine(threadIdx.x);
  RowOfBackward rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query =
        min(first_query + warp_row + mine.row + row_offset(0, 2 * half), params.queries - 1);
    rows[half] = params.rows_of_backward[params.row_index(batch, head, query)];
  }
  wait_for_copies();
  __syncthreads();
  const float to_logit = kBias == BiasKind::kNone ? params.logit_scale : 1.f;
  float query_gradient[1][kColumns][4] = {};
  KeyTiles<kQueries, kKeys> tiles;
  const auto block = [&] {
    struct Block {
      int first_query, head, batch;
    };
    return Block{first_query, head, batch};
  };
#pragma unroll 1
  for (int key = tiles.from(params, batch, head, first_query, first_sees.begin / kKeys * kKeys);
       key < last_sees.end; key = tiles.after(params, key, block)) {
    const auto copy_keys = [&] {
      copy(key_tile, params.key, key_head, key, params.keys, params.head_dim);
    };
    copy(value_tile, params.value, key_head, key, params.keys, params.value_dim);
    constexpr bool kIsShared = kLayout.keys == kLayout.values;
    if (!kIsShared) copy_keys();
    if constexpr (kBias != BiasKind::kNone)
      bias.template fill<kThreads>(batch, head, first_query, key);
    wait_for_copies();
    __syncthreads();
    Excluded<1, kN> excluded;
    const bool is_cut = key < last_sees.begin || key + kKeys > first_sees.end ||
                        first_query + kQueries > params.queries;
    if (is_cut || tiles.may_exclude(key))
      excluded.template find<false>(params, batch, head, first_query + warp_row, key, is_cut);
    float weights[1][kN][4] = {}, gradients[1][kN][4] = {};
    multiply_rows<T, kDim>(gradients, FragmentsDown<QueryTile>(gradient_tile, warp_row),
                           FragmentsAcross<KeyTile>(value_tile, 0));
    if (kIsShared) {
      __syncthreads();  // values are used up
      copy_keys();
      wait_for_copies();
      __syncthreads();
    }
    multiply_rows<T, kDim>(weights, FragmentsDown<QueryTile>(query_tile, warp_row),
                           FragmentsAcross<KeyTile>(key_tile, 0));
    [[maybe_unused]] SlopesOfScores<T, 1, kN> slopes;
    if constexpr (kBias == BiasKind::kSoftcap) {
      cap_products<T>(params, weights);
      slopes.take(weights);
    }
    bias.template add_to<false>(weights, warp_row, 0);
    if (params.dropout.seed != nullptr)
      Dropping<false>(params, batch, head).clear(gradients, first_query + warp_row, key);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const RowOfBackward& row = rows[i / 2];
        const float weight = exp2_approximate(
            fmaf(fmaf(weights[0][n][i], to_logit, -row.max), kLog2E, -row.log2_sum));
        gradients[0][n][i] =
            weight == 0.f ? 0.f
                          : fmaf(gradients[0][n][i], params.dropout.factor, -row.delta) * weight;
      }
    }
    if constexpr (kBias == BiasKind::kSoftcap) slopes.apply(gradients);
    excluded.apply(gradients, 0.f);
    multiply_weights<T>(query_gradient, gradients, FragmentsDown<KeyTile>(key_tile, 0));
    __syncthreads();  // keys, values and bias are used up
  }
  __syncwarp();
  const Strided& tensor = params.query_gradient;
  store_rows<T, QueryTile>(shared_memory, warp_row, query_gradient[0], {params.scale, params.scale},
                           tensor.row<T>(batch, head, first_query), tensor.query_stride,
                           params.queries - first_query, params.head_dim);
}

}  // namespace megasoftmax
