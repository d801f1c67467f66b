#pragma once
// Gradients of O = softmax(S) V, S = scale * Q K^T + B, or S = c * tanh(scale / c * Q K^T) + B:
//   P = exp(S - lse),  dV = P^T dO,  dS = P (dO V^T - delta),  delta = rowsum(dO O) - dlse,
//   dK = scale * dS^T Q,  dQ = scale * dS K,  dB = dS.
// With a softcap c, dK and dQ take dS (1 - tanh^2), and dB takes dS.
// With dropout dV takes the P that were kept, times the factor of dropout, and so does dO V^T in
// dS.
//
// A block owns a tile of keys and values, and takes one tile of queries after the other, of all
// heads that share the keys. dQ is summed in float32 in global memory, over blocks in any order.

#include "../turns.cuh"
#include "backward_tile.cuh"
#include "bias_gradient.cuh"

namespace megasoftmax {

// Adds dQ of a tile of queries from the block's keys to the sums, or writes it if the block has all
// keys. Each warp makes some rows and columns.
template <class T, class Memory, bool kHasTurns>
__device__ __forceinline__ void add_to_query_gradient(const AttentionBackwardParams& params,
                                                      const char* shared_memory, int batch,
                                                      int head, int first_query, int slice) {
  using KeyTile = typename Memory::KeyTile;
  using ScoreTile = typename Memory::ScoreTile;
  constexpr int kWarps = Memory::kThreads / 32;
  constexpr int kFewest = Memory::kSlice >= 64 ? 32 : 16;
  constexpr int kColumns = kFewest * kWarps >= Memory::kSlice ? kFewest : Memory::kSlice / kWarps;
  constexpr int kColumnWarps = Memory::kSlice / kColumns;
  constexpr int kRows = Memory::kQueries * kColumnWarps / kWarps;
  static_assert(kRows % 16 == 0);
  const uint32_t memory = shared_address(shared_memory);
  const KeyTile key_tile{memory};
  const ScoreTile score_tile{memory + Memory::kLayout.scores};
  const int thread = thread_index_anew(), warp = thread / 32;
  const FirstElement mine(thread);
  const int column = warp % kColumnWarps * kColumns + slice;
  const int first_row = warp / kColumnWarps * kRows;
  float gradients[kRows / 16][kColumns / 8][4] = {};
  multiply_transposed<T, Memory::kKeys>(gradients, FragmentsAcross<ScoreTile>(score_tile, 0),
                                        FragmentsDown<KeyTile>(key_tile, 0), first_row, column);
  const int query = first_query + first_row + mine.row;
  if (kHasTurns && params.query_gradient_kind == QueryGradient::kWhole) {
    const Strided& tensor = params.query_gradient;
    T* const first = tensor.row<T>(batch, head, query) + column + mine.column;
#pragma unroll
    for (int i = 0; i < kRows / 4; i += 2) {
      const int row = row_offset(i / 4, i % 4);
      if (query + row >= params.queries) continue;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float* const pair = gradients[i / 4][n] + i % 4;
        if (column + n * 8 < params.head_dim)
          *reinterpret_cast<Pair<T>*>(first + row * tensor.query_stride + column_offset(n, 0)) =
              round_pair<T>(pair[0] * params.scale, pair[1] * params.scale);
      }
    }
    return;
  }
  float* const first = params.query_gradient_sum +
                       params.row_index(batch, head, query) * params.head_dim + column +
                       mine.column;
  const auto add = [&]<bool kIsWhole>() {
#pragma unroll
    for (int i = 0; i < kRows / 4; i += 2) {
      const int row = row_offset(i / 4, i % 4);
      if (!kIsWhole && query + row >= params.queries) continue;
      float* const sums = first + row * params.head_dim;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float* const pair = gradients[i / 4][n] + i % 4;
        if (kIsWhole || column + n * 8 < params.head_dim)
          add_to_global(sums + column_offset(n, 0), pair[0], pair[1]);
      }
    }
  };
  // A branch around each addition costs as much as several additions. Whole tiles have none.
  if (first_query + first_row + kRows <= params.queries && column + kColumns <= params.head_dim) {
    add.template operator()<true>();
  } else {
    add.template operator()<false>();
  }
}

// Unmasked: without mask, ranges and dropout. kHasTurns: blocks take turns at dQ, or dQ is
// whole.
template <class T, BiasKind kBias, bool kIsUnmasked, bool kHasTurns, int kIndex>
__global__ void __launch_bounds__(kAttentionBackwardTiles[kIndex].threads(),
                                  kAttentionBackwardTiles[kIndex].blocks_per_sm)
    attention_backward_kernel(const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  using Memory = BackwardMemory<T, kBias, kIndex>;
  using KeyTile = typename Memory::KeyTile;
  using QueryTile = typename Memory::QueryTile;
  using ScoreTile = typename Memory::ScoreTile;
  constexpr int kThreads = Memory::kThreads, kSlice = Memory::kSlice;
  constexpr int kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  constexpr int kHalfSlice = kSlice / 2, kColumns = kHalfSlice / 8, kM = Memory::kM;
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t memory = shared_address(shared_memory);
  const KeyTile key_tile{memory}, value_tile{memory + Memory::kLayout.values};
  const ScoreTile weight_tile{memory + Memory::kLayout.weights},
      score_tile{memory + Memory::kLayout.scores};
  auto* const rows = reinterpret_cast<RowOfBackward*>(shared_memory + Memory::kLayout.rows);

  int first_key, key_head, batch, slice;
  {
    int tile;
    params.order.place(static_cast<int>(blockIdx.x), tile, key_head, batch);
    if (kHasTurns && params.order_of_turns == OrderOfTurns::kLastKeysFirst)
      tile = params.order.tiles - 1 - tile;
    slice = tile % Memory::kSlices * kSlice;
    first_key = tile / Memory::kSlices * kKeys;
  }
  const KeyRange all_visible = visible_from_all<kKeys>(params, first_key);
  {
    const auto copy = [&](const KeyTile& tile, const Strided& tensor, int columns) {
      tile.template start_copy<kThreads>(tensor.row<const T>(batch, key_head, first_key),
                                         tensor.query_stride, params.keys - first_key, columns);
    };
    copy(key_tile, params.key, params.head_dim);
    copy(value_tile, params.value, params.value_dim);
  }
  const auto stage_of = [&](int step) { return params.stages == 1 ? 0 : step % 2; };
  using Tiles = QueryTiles<kKeys, kQueries, kIsUnmasked, kHasTurns>;
  const auto copy_queries = [&](int step, const Tiles& tiles) {
    const int head = tiles.head, query = tiles.query;
    const QueryTile query_tile{memory + Memory::kLayout.stages +
                               stage_of(step) * Memory::kLayout.stage_bytes};
    const auto copy = [&](const QueryTile& tile, const Strided& tensor, int columns) {
      tile.template start_copy<kThreads>(tensor.row<const T>(batch, head, query),
                                         tensor.query_stride, params.queries - query, columns);
    };
    copy(query_tile, params.query, params.head_dim);
    copy(QueryTile{query_tile.address + QueryTile::kBytes}, params.output_gradient,
         params.value_dim);
    start_copy_of_rows<kQueries>(params, rows + step % 2 * kQueries, batch, head, query);
    end_copies();
  };
  const auto copy_bias = [&](const Tiles& tiles) {
    if constexpr (kBias != BiasKind::kNone)
      typename Memory::Bias{params, shared_memory + Memory::kLayout.bias}.template fill<kThreads>(
          batch, tiles.head, tiles.query, first_key);
  };

  float key_sums[kM][2] = {};  // of gradients of the bias
  float key_gradient[kM][kColumns][4] = {}, value_gradient[kM][kColumns][4] = {};
  Tiles tiles(params, batch, key_head, first_key);
  if (tiles.are_left()) {
    copy_queries(0, tiles);
    copy_bias(tiles);
    wait_for_copies();
    __syncthreads();
  }

  int head = 0, query = 0, step = 0;
  const auto turn = [&] { return turn_of<kQueries>(params, batch, head, query, slice / kSlice); };
  // A turn ends in the middle of the next step. By then its sums were added, so that nobody waits.
  // Another warp waits for the next turn.
  const bool ends_turns = kHasTurns && params.turns != nullptr && threadIdx.x == kThreads - 32;
  [[maybe_unused]] uint32_t* taken = nullptr;
#pragma unroll 1
  for (; tiles.are_left(); ++step) {
    wait_for_copies();
    __syncthreads();  // this step's copies are there, the step before is done
    head = tiles.head;
    query = tiles.query;
    tiles.advance(params, batch, first_key);
    if (params.stages > 1 && tiles.are_left()) copy_queries(step + 1, tiles);

    Excluded<kM, Memory::kN> excluded;
    const bool is_cut = query < all_visible.begin || query + kQueries > all_visible.end;
    if (is_cut || (!kIsUnmasked && params.block_mask.words != nullptr)) {
      const BackwardWarp warp(Memory::kSide);
      excluded.template find<true, kIsUnmasked>(params, batch, head, query + warp.query,
                                                first_key + warp.key, is_cut);
    }
    const FirstScore at{batch, head, query, first_key};
    typename Memory::Scores weights = {}, gradients = {};
    [[maybe_unused]] SlopesOfScores<T, kM, Memory::kN> slopes;
    const uint32_t stage =
        memory + Memory::kLayout.stages + stage_of(step) * Memory::kLayout.stage_bytes;
    const BackwardWarp warp(Memory::kSide);
    find_score_gradients<T, kBias, kIsUnmasked, true, Memory>(
        params, at,
        {memory, memory + Memory::kLayout.values, stage, stage + QueryTile::kBytes,
         rows + step % 2 * kQueries},
        warp, excluded, weights, gradients,
        [&](typename Memory::Scores& scores) {
          if constexpr (kBias == BiasKind::kSoftcap) slopes.take(scores);
          typename Memory::Bias{params, shared_memory + Memory::kLayout.bias}.template add_to<true>(
              scores, warp.query, warp.key);
        },
        [] {});
    // A bias takes its gradient before a softcap's slopes join.
    constexpr bool kIsBent = kBias == BiasKind::kSoftcap;
    const bool bends_late = kIsBent && is_made_beside_keys(params.bias_gradient_kind);
    if (kIsBent && !bends_late) slopes.apply(gradients);
    share_scores<T, ScoreTile, !kIsUnmasked>(shared_memory + Memory::kLayout.weights, weights);
    share_scores<T, ScoreTile>(shared_memory + Memory::kLayout.scores, gradients);
    const auto with_gradient = [&](auto&& body) {
      if (slice == 0)
        with_bias_gradient<kBias, ScoreTile>(params, at, key_sums, tiles.head != at.head, body);
    };
    with_gradient([&](auto policy) { policy.take(params, at, gradients); });
    if (ends_turns) {
      if (step > 0) pass_turn(taken);
      taken = turn();
    }
    if constexpr (kHasTurns) {
      if (params.turns != nullptr && threadIdx.x == 0)
        wait_for_turn(turn(), turns_before<kKeys, kQueries, kIsUnmasked, true>(params, batch, head,
                                                                               query, first_key));
    }
    __syncthreads();  // weights and gradients of all scores are there, the bias is used up
    if (tiles.are_left()) copy_bias(tiles);
    with_gradient([&](auto policy) {
      policy.take_shared(params, at, shared_memory + Memory::kLayout.scores);
    });
    if (bends_late) {
      slopes.apply(gradients);
      __syncthreads();  // gradients of all logits are used up
      share_scores<T, ScoreTile>(shared_memory + Memory::kLayout.scores, gradients);
      __syncthreads();
    }
    {
      const BackwardWarp warp(Memory::kSide);
      const int column = slice + warp.half * kHalfSlice;
      const QueryTile query_tile{memory + Memory::kLayout.stages +
                                 stage_of(step) * Memory::kLayout.stage_bytes};
      const QueryTile gradient_tile{query_tile.address + QueryTile::kBytes};
      multiply_tiles<T, kQueries>(value_gradient, FragmentsDown<ScoreTile>(weight_tile, warp.key),
                                  FragmentsDown<QueryTile>(gradient_tile, 0), column);
      multiply_tiles<T, kQueries>(key_gradient, FragmentsDown<ScoreTile>(score_tile, warp.key),
                                  FragmentsDown<QueryTile>(query_tile, 0), column);
    }
    if (params.query_gradient_sum != nullptr || kHasTurns)
      add_to_query_gradient<T, Memory, kHasTurns>(params, shared_memory, batch, head, query, slice);
    if (params.stages == 1 && tiles.are_left()) {
      __syncthreads();  // queries and gradients are used up
      copy_queries(step + 1, tiles);
    }
  }
  wait_for_copies();
  __syncthreads();
  if (ends_turns && step > 0) pass_turn(taken);

  // The results pass through the place of keys and values.
  const auto store = [&](int at, const float (&sums)[kM][kColumns][4], float factor,
                         const Strided& tensor, int width) {
    const BackwardWarp warp(Memory::kSide);
    const int column = warp.half * kHalfSlice;
    T* const out = tensor.row<T>(batch, key_head, first_key) + slice;
#pragma unroll
    for (int m = 0; m < kM; ++m)
      store_rows<T, KeyTile>(shared_memory + at, warp.key + m * 16, sums[m], {factor, factor}, out,
                             tensor.query_stride, params.keys - first_key, width - slice, column);
  };
  store(0, key_gradient, params.scale, params.key_gradient, params.head_dim);
  store(Memory::kLayout.values, value_gradient, params.dropout.factor, params.value_gradient,
        params.value_dim);
}

}  // namespace megasoftmax
