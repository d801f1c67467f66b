#pragma once
// Warps of the copying warpgroup of Hopper's forward. With HopperMask::kAny they find what
// the next tile of queries sees. With a relative bias they fill in its entries. With a mask or a
// bias of keys the first one writes the rows of each tile, see RowsOfKeys.

#include "../rows_of_keys.cuh"
#include "block.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, int kIndex>
__device__ __forceinline__ void HopperForward<T, kBias, kMask, kIndex>::find_and_fill(
    const AttentionForwardParams& params, const Memory& memory, WorkOfBlock& work) {
  uint32_t first_step = 0;  // steps of the tiles of queries before
  extern __shared__ __align__(1024) char shared_memory[];
  const bool is_first = threadIdx.x % 32 == 0;
  const int finder = static_cast<int>(threadIdx.x) / 32 - 1;
  constexpr int kWarps = kMasksKeys && !Memory::kIsTable ? 1 : Memory::kFinders;
  if (finder >= kWarps) return;
  int number;
  for (int done = 0; may_come(work, memory.tile_is_assigned(), done, number);
       work.advance(), ++done) {
    if (kIsUnmasked && !work.is_left()) continue;
    auto& assigned = Memory::assignment(shared_memory, done);
    if constexpr (!kIsUnmasked) {
      const Queries tile(params, kQueries, number);
      for (int group = finder; group < kWarpgroups; group += Memory::kFinders)
        assigned.find(params, tile, group);
      __syncwarp();  // all lanes have written theirs
      if (is_first) memory.ranges_are_there().arrive();
    }
    if constexpr (Memory::kIsTable || kMasksKeys) {
      if (!kIsUnmasked) memory.ranges_are_there().wait(done & 1);
      const Queries queries = queries_of(params, work, assigned);
      const BiasRows<T> bias(params, queries.batch, queries.head);
      TilesToCopy tiles(params, queries, assigned, first_step);
      // The next step's, so that no step waits for them.
      [[maybe_unused]] RowsOfKeys<T, kKeys, kBiasesKeys> rows;
      const auto load_rows = [&] {
        if (kMasksKeys && finder == 0 && tiles.are_left())
          rows.load(params, queries.batch, queries.head, tiles.key);
      };
      load_rows();
      while (tiles.are_left()) {
        const int stage = tiles.step % kStages;
        if (kMasksKeys && finder == 0) {
          memory.keys_are_used(stage).wait((tiles.step / kStages & 1) ^ 1);
          const bool has_large =
              rows.store(params, memory.masked(stage), Memory::kMaskedPanelBytes);
          if (kBiasesKeys && is_first) Memory::step(shared_memory, stage) = has_large;
          publish_writes();
          __syncwarp();  // all lanes have written theirs
          if (is_first) memory.keys_are_there(stage).arrive();
        }
        if constexpr (Memory::kIsTable) {
          Memory::diagonals(shared_memory, stage)
              .template fill<32 * Memory::kFillers>(
                  static_cast<int>(threadIdx.x) - 32, bias, queries.first_query, tiles.key,
                  params.queries, params.keys,
                  [&] { memory.bias_is_used(stage, 0).wait((tiles.step / kStages & 1) ^ 1); });
          __syncwarp();  // all lanes have written theirs
          if (is_first) memory.bias_is_there(stage, 0).arrive();
        }
        tiles.advance(params, queries, assigned);
        load_rows();
      }
      first_step = uniform(tiles.step);
      if constexpr (!kIsUnmasked) {
        memory.wait_until_tile_before_is_done(done);
        __syncwarp();  // all lanes have read what is assigned
        if (is_first) memory.tile_is_done().arrive();
      }
    }
  }
}

}  // namespace megasoftmax
