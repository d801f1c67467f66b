#pragma once
// O = softmax(scale * Q K^T + B) V, without writing scores.
//
// A block owns a tile of queries of one head, a warp 16 or 32 of them, and takes one tile of keys
// and values after the other. The bias is added to the scaled product of queries and keys;
// exclusion follows; then the softmax, online; then the product with the values. Queries, keys and
// values are read once per tile of queries, mostly from the L2 cache, the bias once, the output
// written once. Where there are few tiles of queries, several blocks have the same queries and each
// takes a part of the keys.

#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../dropping.cuh"
#include "../exclusion.cuh"
#include "../layout.h"
#include "../online_softmax.cuh"
#include "../parts.cuh"
#include "../softcap.cuh"
#include "../tile_of_queries.cuh"
#include "tile.cuh"

namespace megasoftmax {

template <class T, BiasKind kBias, int kIndex>
struct ForwardMemory {
  static constexpr AttentionTile kTile = kAttentionForwardTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kWarpQueries = kTile.queries_per_warp, kQueries = kTile.queries();
  static_assert(kMaskTile % kKeys == 0 && kQueries % kMaskTile == 0 &&
                kMaskTile % kWarpQueries == 0 && kTile.element_bytes == sizeof(T));
  using Queries = Tile<T, kQueries, kDim>;
  using Keys = Tile<T, kKeys, kDim>;
  using Bias = SharedBias<T, kBias, kQueries, kKeys>;
  static constexpr ForwardLayout kLayout{kTile, kBias};
};

// Unmasked: without mask, ranges and dropout.
template <class T, BiasKind kBias, bool kIsUnmasked, int kIndex>
__global__ void __launch_bounds__(kAttentionForwardTiles[kIndex].threads(),
                                  kAttentionForwardTiles[kIndex].blocks_per_sm)
    attention_forward_kernel(const __grid_constant__ AttentionForwardParams params) {
  if (!kIsAmpere) return;
  using Memory = ForwardMemory<T, kBias, kIndex>;
  using QueryTile = typename Memory::Queries;
  using KeyTile = typename Memory::Keys;
  using BiasTile = typename Memory::Bias::Rows;
  constexpr int kDim = Memory::kDim, kThreads = Memory::kThreads;
  constexpr int kWarpQueries = Memory::kWarpQueries, kQueries = Memory::kQueries;
  constexpr int kKeys = Memory::kKeys, kStep = kIsUnmasked ? kKeys : kMaskTile;
  constexpr int kM = kWarpQueries / 16, kN = kKeys / 8, kColumns = kDim / 8;
  extern __shared__ __align__(1024) char shared_memory[];
  const QueryTile query_tile{shared_address(shared_memory)};
  const KeyTile key_tile{query_tile.address + Memory::kLayout.keys};
  const KeyTile value_tile{query_tile.address + Memory::kLayout.values};

  [[maybe_unused]] KeyTiles<kQueries, kKeys> tiles;
  int begin, end, all_visible_begin, all_visible_end, first_query;
  const T *key_rows, *value_rows;
  [[maybe_unused]] const T* bias_rows = nullptr;
  {
    const TileOfQueries block(params, kQueries);
    first_query = block.first_query;
    const int last_query = min(block.first_query + kQueries, params.queries) - 1;
    const KeyRange first_sees = visible_keys(params, block.first_query),
                   last_sees = visible_keys(params, last_query);
    const KeyRange part =
        part_of<kStep>(params, {first_sees.begin / kStep * kStep, last_sees.end}, block.split);
    begin = part.begin;
    end = part.end;
    all_visible_begin = last_sees.begin;
    all_visible_end = first_sees.end - kKeys;
    query_tile.template start_copy<kThreads>(
        params.query.row<const T>(block.batch, block.head, block.first_query),
        params.query.query_stride, params.queries - block.first_query, params.head_dim);
    if constexpr (!kIsUnmasked)
      begin = tiles.from(params, block.batch, block.head, first_query, begin);
    int key_head, rest;
    params.heads_per_key_head.split(block.head, key_head, rest);
    key_rows = params.key.row<const T>(block.batch, key_head, 0);
    value_rows = params.value.row<const T>(block.batch, key_head, 0);
    if constexpr (kBias == BiasKind::kTile)
      bias_rows = BiasRows<T>(params, block.batch, block.head).row(block.first_query);
  }
  // With room for two tiles of the bias, the next one is loaded early: memory is slower than the L2
  // cache, which has the keys.
  const bool is_bias_ahead = kBias == BiasKind::kTile && params.bias_stages == 2;
  [[maybe_unused]] int bias_stage = 0;
  const auto bias_tile_of = [&](int stage) {
    return BiasTile{query_tile.address + Memory::kLayout.bias + stage * BiasTile::kBytes};
  };
  const typename Memory::Bias bias{params, shared_memory + Memory::kLayout.bias};
  const auto copy_bias = [&](int key, int stage) {
    if constexpr (kBias == BiasKind::kTile) {
      bias_tile_of(stage).template start_copy<kThreads>(bias_rows + key, params.bias.query_stride,
                                                        params.queries - first_query,
                                                        params.keys - key);
    } else if constexpr (has_float_tile(kBias)) {
      const TileOfQueries block(params, kQueries);
      bias.template fill<kThreads>(block.batch, block.head, block.first_query, key);
    }
  };
  const auto copy_keys = [&](int key) {
    key_tile.template start_copy<kThreads>(key_rows + key * params.key.query_stride,
                                           params.key.query_stride, params.keys - key,
                                           params.head_dim);
  };

  float output[kM][kColumns][4] = {};
  OnlineSoftmax<kM> softmax(params.logit_scale);
  if (begin < end) {
    copy_keys(begin);
    copy_bias(begin, 0);
    end_copies();
  }
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpQueries;
  const FragmentsDown<QueryTile> query_fragments(query_tile, warp_row);
  const FragmentsAcross<KeyTile> key_fragments(key_tile, 0);
  const FragmentsDown<KeyTile> value_fragments(value_tile, 0);

#pragma unroll 1
  for (int key = begin, next = 0; key < end; key = next) {
    const bool is_cut = key < all_visible_begin || key > all_visible_end;
    bool may_exclude = is_cut;
    if constexpr (kIsUnmasked) {
      next = key + kKeys;
    } else {
      may_exclude = is_cut || tiles.may_exclude(key);
      next = tiles.after(params, key, [&] { return TileOfQueries(params, kQueries); });
    }
    wait_for_copies();
    __syncthreads();  // keys and bias are there, the values before are used up
    value_tile.template start_copy<kThreads>(value_rows + key * params.value.query_stride,
                                             params.value.query_stride, params.keys - key,
                                             params.value_dim);
    end_copies();
    if (is_bias_ahead) {
      if (next < end) copy_bias(next, bias_stage ^ 1);
      end_copies();
    }

    Excluded<kM, kN> excluded;
    if (may_exclude) {
      const TileOfQueries block(params, kQueries);
      const int first_query = block.first_query + thread_index_anew() / 32 * kWarpQueries;
      excluded.template find<false, kIsUnmasked>(params, block.batch, block.head, first_query, key,
                                                 is_cut);
    }
    float scores[kM][kN][4] = {};
    multiply_rows<T, kDim>(scores, query_fragments, key_fragments);
    if constexpr (kBias == BiasKind::kSoftcap) cap_products<T>(params, scores);
    if constexpr (kBias == BiasKind::kTile) {
      add_bias(scores, params.logit_scale,
               TileBias<T, false, BiasTile>(bias_tile_of(bias_stage), warp_row, 0));
    } else {
      bias.template add_to<false>(scores, warp_row, 0);
    }
    excluded.apply(scores, -INFINITY);

    if (is_bias_ahead) {
      wait_for_older_copies<1>();
    } else {
      wait_for_copies();
    }
    __syncthreads();  // values are there, keys and bias are used up
    if (next < end) {
      copy_keys(next);
      if (!is_bias_ahead) copy_bias(next, 0);
      end_copies();
    }
    if (is_bias_ahead) bias_stage ^= 1;
    softmax.template step<kBias != BiasKind::kNone>(scores, output);
    if (!kIsUnmasked && params.dropout.seed != nullptr) {
      const TileOfQueries block(params, kQueries);
      const int first_query = block.first_query + thread_index_anew() / 32 * kWarpQueries;
      if constexpr (sizeof(T) == 2) {
        multiply_weights<T>(output, scores, value_fragments,
                            DropOfRounded<kM>(params, block.batch, block.head, first_query, key));
        continue;
      } else {
        Dropping<false>(params, block.batch, block.head).clear(scores, first_query, key);
      }
    }
    multiply_weights<T>(output, scores, value_fragments);
  }
  const TileOfQueries block(params, kQueries);
  const int head = block.head, batch = block.batch;
  const FirstElement mine;
  const int warp = thread_index_anew() / 32;
  const int warp_query = block.first_query + warp * kWarpQueries;
  const int64_t first_row = params.row_index(batch, head, warp_query);
  if (params.parts != nullptr) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
      store_parts(params, block.split, first_row + mine.row + m * 16,
                  warp_query + mine.row + m * 16, output[m], softmax.max[m], softmax.sum[m]);
    return;
  }
  const RowEnds row_ends(params, batch, head);
  float factors[kM][2];
  // If no key is visible, queries may still be copied to the place of the results.
  wait_for_copies();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = mine.row + row_offset(m, 2 * half);
      const RowEnd row_end =
          row_ends.of(warp_query + row, softmax.max[m][half], sum_of_row(softmax.sum[m][half]));
      if (mine.column == 0 && warp_query + row < params.queries)
        row_end.store(params, first_row + row);
      factors[m][half] = row_end.factor * (kIsUnmasked ? 1.f : params.dropout.factor);
    }
  }
  // Results pass through the place of this warp's queries.
  T* const output_rows = params.output.row<T>(batch, head, block.first_query);
#pragma unroll
  for (int m = 0; m < kM; ++m)
    store_rows<T, QueryTile>(shared_memory, warp * kWarpQueries + m * 16, output[m], factors[m],
                             output_rows, params.output.query_stride,
                             params.queries - block.first_query, params.value_dim);
}

}  // namespace megasoftmax
