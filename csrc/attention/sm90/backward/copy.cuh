#pragma once
// The copying warpgroup of Hopper's backward. One warp copies to shared memory: keys and values of
// the block, then queries, gradients of outputs and a dense bias of one tile after the other.
//
// Two other warps may add dQ to the sums in global memory, see add_query_gradients.cuh. The last
// one may be a row worker, see row_worker.cuh.
//
// With a relative bias another warp fills in its entries for a tile, and all four warps sum
// gradients of scores along diagonals, while the next tile runs.

#include "../../exclusion.cuh"
#include "../rows_anywhere.cuh"
#include "add_query_gradients.cuh"
#include "block.cuh"
#include "dense_bias_gradient.cuh"
#include "diagonal_sums.cuh"
#include "place_rows.cuh"
#include "row_worker.cuh"
#include "tile_steps.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, bool kHasTurns, int kIndex>
__device__ __forceinline__ void HopperBackward<T, kBias, kMask, kHasTurns, kIndex>::copy(
    const AttentionBackwardParams& params, const BackwardTensorMaps& maps, const Memory& memory,
    const BiasGradientSums<kBias>& bias_sums, const Block& block) {
  const int first_key = block.first_key, key_head = block.key_head, batch = block.batch;
  auto tiles = block.tiles;
  extern __shared__ __align__(1024) char shared_memory[];
  constexpr int kPanels = Memory::kPanels, kValuePanels = Memory::kValuePanels;
  const bool is_first = threadIdx.x == 0;
  const BlockMaskLayout& layout = params.block_mask.layout;
  const bool copies_masked =
      !kIsUnmasked && params.block_mask.words != nullptr && layout.has_bits_by_key();
  const bool has_ranges = !kIsUnmasked && params.visible.are_given();
  const auto start_copy_of_tile = [&](int head, int query, int step) {
    const int stage = step % kStages;
    [[maybe_unused]] KeyRange ranges[kQueries / 32];
    if (has_ranges) find_ranges(ranges, params, batch, head, query);
    memory.stage_is_used(stage).wait((step / kStages & 1) ^ 1);
    if (has_ranges) {
#pragma unroll
      for (int i = 0; i < kQueries / 32; i += 2) {
        const int begin = largest_of_lanes(max(ranges[i].begin, ranges[i + 1].begin));
        const int end = smallest_of_lanes(min(ranges[i].end, ranges[i + 1].end));
        if (is_first) Memory::ranges_of_panels(shared_memory, stage)[i / 2] = make_int2(begin, end);
        for (int j = i; j < i + 2; ++j)
          Memory::ranges(shared_memory, stage)[32 * j + thread_index_anew() % 32] =
              make_int2(ranges[j].begin, ranges[j].end);
      }
      __syncwarp();  // all lanes have written theirs
    }
    if (!is_first) return;
    const Barrier there = memory.stage_is_there(stage);
    const int rows = min(kQueries, params.queries - query);
    const int masked_bytes =
        copies_masked ? divide_up(rows, kMaskTile) * Memory::kMaskedTileBytes : 0;
    const int masked_tiles = min(kWarpgroups, layout.key_tiles - first_key / kMaskTile);
    there.arrive_and_expect(Memory::kStageBytes + Memory::kPairsBytes +
                            masked_tiles * masked_bytes);
    for (int i = 0; i < masked_tiles && copies_masked; ++i)
      start_copy_of_bytes(memory.masked(stage, i),
                          params.block_mask.of(batch, head) +
                              layout.bits_by_key(first_key / kMaskTile + i, query / kMaskTile),
                          masked_bytes, there);
    start_copy_of_panels<kPanels>(memory.queries(stage), maps.query, there, kQueries, query, head,
                                  batch);
    start_copy_of_panels<kValuePanels>(memory.gradients(stage), maps.output_gradient, there,
                                       kQueries, query, head, batch);
    if (kMayHaveRowWorker && step == 0 && params.sections_apart != 0)
      wait_for_rows(params, section_of_block(params));
    start_copy_of_bytes(memory.pairs(stage),
                        params.pairs_of_rows + params.pair_index(batch, head, query),
                        Memory::kPairsBytes, there);
  };
  if constexpr (kHasTable) {
    // All warps sum a tile when they have started to copy the second tile after it.
    const int warp = static_cast<int>(uniform(threadIdx.x / 32));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const typename Memory::DiagonalSums sums{
        reinterpret_cast<float*>(shared_memory + Memory::kDiagonalSumsAt)};
    if (is_first) start_copy_of_keys(memory, maps, first_key, key_head, batch);
    const auto sync = [] { sync_warps<kWarpgroups + 2, Memory::kSummingWarps>(); };
    auto summed = tiles;
    // Counts the tiles that are copied, and those that are summed.
    for (int step = 0, done = 0;;) {
      const int stage = step % kStages;
      if (tiles.are_left()) {
        if (warp == 0) start_copy_of_tile(tiles.head, tiles.query, step);
        if (warp == 1) {
          Memory::diagonals(shared_memory, stage)
              .template fill<32>(lane, BiasRows<T>(params, batch, tiles.head), tiles.query,
                                 first_key, params.queries, params.keys, [&] {
                                   memory.stage_is_used(stage).wait((step / kStages & 1) ^ 1);
                                 });
          __syncwarp();  // all lanes have written theirs
          if (lane == 0) memory.stage_is_there(stage).arrive();
        }
        tiles.advance(params, batch, first_key);
        ++step;
        if (step < done + 3 && tiles.are_left()) continue;
      }
      if (bias_sums.has_diagonals && done == 0) {  // also where no tile is
        sums.clear();
        const int heads = static_cast<int>(params.heads_per_key_head.divisor);
        for (int head = key_head * heads; head < (key_head + 1) * heads; ++head)
          sums.clear(diagonals_of<kKeys>(params, batch, head, first_key), params.queries);
      }
      if (!summed.are_left()) return;
      if (bias_sums.has_diagonals) {
        const int buffer = done % 2;
        memory.gradients_are_there(buffer).wait(done / 2 & 1);
        sync();
        sums.template add_blocks<T>(memory.scores(buffer));
        sync();
        sums.template add_to<T>(diagonals_of<kKeys>(params, batch, summed.head, first_key),
                                params.queries, summed.query, memory.scores(buffer));
        __syncwarp();  // all lanes have read theirs
        if (lane == 0) memory.scores_are_used(buffer).arrive();
      }
      summed.advance(params, batch, first_key);
      ++done;
    }
  }
  if (threadIdx.x >= 32) {
    if constexpr (Memory::kIsRows) place_rows_anywhere(params, memory, block);
    if (has_adding_warps(bias_sums) && threadIdx.x / 32 - 1 < kWarpgroups) {
      add_query_gradients(params, maps, memory, block);
    } else if constexpr (kMayHaveRowWorker) {
      if (params.sections_apart != 0) RowWorker<T, Memory>{params, maps, memory}.run();
    } else if constexpr (kHasTile) {
      make_dense_bias_gradient(params, memory, bias_sums, block);
    }
    return;
  }
  if (is_first) start_copy_of_keys(memory, maps, first_key, key_head, batch);
  // Pieces of rows that begin anywhere are copied a step before queries: warps take time to bring
  // them to their tile.
  [[maybe_unused]] auto tiles_of_pieces = tiles;
  [[maybe_unused]] int pieces = 0;
  const auto copy_pieces = [&] {
    if (!tiles_of_pieces.are_left()) return;
    int bias_batch, bias_head;
    params.entry_of_bias(batch, tiles_of_pieces.head, bias_batch, bias_head);
    const CopyOfRowsAnywhere<Memory::kPieceRows, kKeys> copy(params, bias_batch, bias_head,
                                                             first_key);
#pragma unroll 1
    for (int piece = 0; piece < Memory::kPieces; ++piece, ++pieces) {
      const int slot = pieces % Memory::kSlots;
      memory.sent_is_used(slot).wait((pieces / Memory::kSlots & 1) ^ 1);
      __syncwarp();  // all lanes have waited
      copy.start(params, maps.bias, memory.piece(slot), memory.sent_is_there(slot),
                 tiles_of_pieces.query + piece * Memory::kPieceRows);
    }
    tiles_of_pieces.advance(params, batch, first_key);
  };
  if constexpr (Memory::kIsRows) copy_pieces();
  int step = 0;
  for (; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
    const int head = tiles.head, query = tiles.query;
    start_copy_of_tile(head, query, step);
    if constexpr (kHasTile) {
      const int buffer = step % 2;
      if constexpr (Memory::kIsRows) {
        copy_pieces();
        continue;
      }
      int bias_batch, bias_head;
      params.entry_of_bias(batch, head, bias_batch, bias_head);
      memory.scores_are_used(buffer).wait((step / 2 & 1) ^ 1);
      if (!is_first) continue;
      const Barrier there = memory.bias_is_there(buffer);
      there.arrive_and_expect(Memory::kScoreBytes);
      for (int i = 0; i < kWarpgroups; ++i)
        start_copy_of_box(memory.scores(buffer) + i * Memory::kScorePanelBytes, maps.bias, there,
                          first_key + 64 * i, query, bias_head, bias_batch);
    }
  }
  // A block must not end while others arrive at its barriers.
  if constexpr (kHasTile) {
    for (int last = step + 2; bias_sums.is_in_cluster && step < last; ++step)
      memory.scores_are_used(step % 2).wait((step / 2 & 1) ^ 1);
  }
}

}  // namespace megasoftmax
