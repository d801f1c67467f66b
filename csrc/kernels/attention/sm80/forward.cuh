#pragma once
// O = softmax(scale * Q K^T + B) V, without writing scores.
//
// A block owns a tile of queries of one head, a warp 16 or 32 of them, and takes one tile of keys
// and values after the other. The bias is added to the scaled product of queries and keys;
// exclusion follows; then the softmax, online; then the product with the values. Queries, keys and
// values are read once per tile of queries, mostly from the L2 cache, the bias once, the output
// written once.

#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../exclusion.cuh"
#include "../limits.h"
#include "../online_softmax.cuh"
#include "tile.cuh"

namespace megasoftmax {

template <class T, int kIndex>
struct ForwardMemory {
  static constexpr AttentionTile kTile = kAttentionForwardTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kWarpQueries = kTile.queries_per_warp, kQueries = kTile.queries();
  using Queries = Tile<T, kQueries, kDim>;
  using Keys = Tile<T, kKeys, kDim>;
  using Bias = Tile<T, kQueries, kKeys>;
  using FloatBias = FloatBiasTile<kQueries, kKeys, kDim <= 128 ? 8 : 4>;

  // Queries, keys, values, bias.
  static constexpr int kBiasOffset = Queries::kBytes + 2 * Keys::kBytes;
  static constexpr int bytes(BiasKind bias, int bias_stages) {
    return kBiasOffset + (bias == BiasKind::kTile  ? bias_stages * Bias::kBytes
                          : bias == BiasKind::kAny ? FloatBias::kBytes
                                                   : 0);
  }
};

// What a block owns. Cheap enough to be found anew where it is needed seldom.
struct TileOfQueries {
  int first_query, head, batch;

  __device__ TileOfQueries(const AttentionParams& params, int queries_per_tile) {
    int tile;
    params.place(block_index_anew(), tile, head, batch);
    // Of causal attention the last queries see most keys: they begin first.
    first_query = (static_cast<int>(params.tiles.divisor) - 1 - tile) * queries_per_tile;
  }
};

template <class T, BiasKind kBias, int kIndex>
__global__ void __launch_bounds__(kAttentionForwardTiles[kIndex].threads(),
                                  kAttentionForwardTiles[kIndex].blocks_per_sm)
    attention_forward_kernel(const __grid_constant__ AttentionForwardParams params) {
  using Memory = ForwardMemory<T, kIndex>;
  using QueryTile = typename Memory::Queries;
  using KeyTile = typename Memory::Keys;
  using BiasTile = typename Memory::Bias;
  constexpr int kDim = Memory::kDim, kThreads = Memory::kThreads;
  constexpr int kWarpQueries = Memory::kWarpQueries, kQueries = Memory::kQueries;
  constexpr int kKeys = Memory::kKeys;
  constexpr int kM = kWarpQueries / 16, kN = kKeys / 8, kColumns = kDim / 8;
  extern __shared__ __align__(1024) char shared_memory[];
  const QueryTile query_tile{shared_address(shared_memory)};
  const KeyTile key_tile{query_tile.address + QueryTile::kBytes};
  const KeyTile value_tile{key_tile.address + KeyTile::kBytes};
  const typename Memory::FloatBias float_bias{
      reinterpret_cast<float*>(shared_memory + Memory::kBiasOffset), params.is_relative};

  int begin, end, all_visible_begin, all_visible_end, first_query;
  const T *key_rows, *value_rows;
  [[maybe_unused]] const T* bias_rows = nullptr;
  {
    const TileOfQueries block(params, kQueries);
    first_query = block.first_query;
    const int last_query = min(block.first_query + kQueries, params.queries) - 1;
    const KeyRange first_sees = visible_keys(params, block.first_query),
                   last_sees = visible_keys(params, last_query);
    begin = first_sees.begin / kKeys * kKeys;
    end = last_sees.end;
    all_visible_begin = last_sees.begin;
    all_visible_end = params.mask.data == nullptr ? first_sees.end - kKeys : -1;
    int key_head, rest;
    params.heads_per_key_head.split(block.head, key_head, rest);
    key_rows = params.key.row<const T>(block.batch, key_head, 0);
    value_rows = params.value.row<const T>(block.batch, key_head, 0);
    if constexpr (kBias == BiasKind::kTile)
      bias_rows = BiasRows<T>(params, block.batch, block.head).row(block.first_query);
    // Where no key is visible the tile holds results at once, which a late copy would overwrite.
    if (begin < end)
      query_tile.template start_copy<kThreads>(
          params.query.row<const T>(block.batch, block.head, block.first_query),
          params.query.query_stride, params.queries - block.first_query, params.head_dim);
  }
  // Tiles of the bias take turns where there is room for two: memory is slower than the L2 cache,
  // which has the keys.
  const bool is_bias_ahead = kBias == BiasKind::kTile && params.bias_stages == 2;
  const auto bias_tile_of = [&](int key) {
    const int stage = is_bias_ahead ? key / kKeys % 2 : 0;
    return BiasTile{query_tile.address + Memory::kBiasOffset + stage * BiasTile::kBytes};
  };
  const auto copy_bias = [&](int key) {
    if constexpr (kBias == BiasKind::kTile) {
      bias_tile_of(key).template start_copy<kThreads>(bias_rows + key, params.bias.query_stride,
                                                      params.queries - first_query,
                                                      params.keys - key);
    } else if constexpr (kBias == BiasKind::kAny) {
      const TileOfQueries block(params, kQueries);
      float_bias.template fill<kThreads>(BiasRows<T>(params, block.batch, block.head),
                                         block.first_query, key, params.queries, params.keys);
    }
  };
  const auto copy_keys = [&](int key) {
    key_tile.template start_copy<kThreads>(key_rows + key * params.key.query_stride,
                                           params.key.query_stride, params.keys - key,
                                           params.head_dim);
  };

  float output[kM][kColumns][4] = {};
  OnlineSoftmax<kM> softmax(params.scale);
  if (begin < end) {
    copy_keys(begin);
    copy_bias(begin);
    end_copies();
  }
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpQueries;
  const FragmentsDown<QueryTile> query_fragments(query_tile, warp_row);
  const FragmentsAcross<KeyTile> key_fragments(key_tile, 0);
  const FragmentsDown<KeyTile> value_fragments(value_tile, 0);

#pragma unroll 1
  for (int key = begin; key < end; key += kKeys) {
    wait_for_copies();
    __syncthreads();  // keys and bias are there, the values before are used up
    value_tile.template start_copy<kThreads>(value_rows + key * params.value.query_stride,
                                             params.value.query_stride, params.keys - key,
                                             params.value_dim);
    end_copies();
    if (is_bias_ahead) {
      if (key + kKeys < end) copy_bias(key + kKeys);
      end_copies();
    }

    Excluded<kM, kN> excluded;
    if (key < all_visible_begin || key > all_visible_end) {
      const TileOfQueries block(params, kQueries);
      const int first_query = block.first_query + thread_index_anew() / 32 * kWarpQueries;
      excluded.template find<false>(params, block.batch, block.head, first_query, key);
    }
    float scores[kM][kN][4] = {};
    multiply_rows<T, kDim>(scores, query_fragments, key_fragments);
    if constexpr (kBias == BiasKind::kTile) {
      const FragmentsDown<BiasTile> fragments(bias_tile_of(key), warp_row);
      add_bias(scores, params.scale, TileBias<T, FragmentsDown<BiasTile>>{fragments});
    } else if constexpr (kBias == BiasKind::kAny) {
      add_bias(scores, params.scale, FloatBias<typename Memory::FloatBias>(float_bias, warp_row));
    }
    excluded.apply(scores, -INFINITY);

    if (is_bias_ahead) {
      wait_for_older_copies<1>();
    } else {
      wait_for_copies();
    }
    __syncthreads();  // values are there, keys and bias are used up
    if (key + kKeys < end) {
      copy_keys(key + kKeys);
      if (!is_bias_ahead) copy_bias(key + kKeys);
      end_copies();
    }
    softmax.template step<kBias != BiasKind::kNone>(scores, output);
    multiply_weights<T>(output, scores, value_fragments);
  }
  const TileOfQueries block(params, kQueries);
  const int head = block.head, batch = block.batch;
  const int lane = thread_index_anew() % 32, warp = thread_index_anew() / 32;
  const int warp_query = block.first_query + warp * kWarpQueries;
  const float sink = params.sink.is_present() ? sink_logit(params.sink, head) : -INFINITY;
  const int64_t rows = params.rows(),
                first_row = (int64_t{batch} * params.heads + head) * params.queries + warp_query;
  float factors[kM][2];
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const RowEnd row_end(softmax.max[m][half], sum, sink, params.can_exclude);
      const int row = m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && warp_query + row < params.queries) {
        params.statistics[first_row + row] = row_end.max;
        params.statistics[rows + first_row + row] = row_end.log_sum;
        params.statistics[2 * rows + first_row + row] = row_end.lse;
      }
      factors[m][half] = row_end.factor;
    }
  }
  // Through what held this warp's queries.
  T* const output_rows = params.output.row<T>(batch, head, block.first_query);
#pragma unroll
  for (int m = 0; m < kM; ++m)
    store_rows<T, QueryTile>(shared_memory, warp * kWarpQueries + m * 16, output[m], factors[m],
                             output_rows, params.output.query_stride,
                             params.queries - block.first_query, params.value_dim);
}

}  // namespace megasoftmax
