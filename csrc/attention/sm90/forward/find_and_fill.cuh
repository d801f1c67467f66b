#pragma once
// Warps of the copying warpgroup of Hopper's forward. With HopperMask::kAny they find what
// the next tile of queries sees. With a relative bias they fill in its entries. Rows of a dense
// bias that begin anywhere they move.

#include "block.cuh"
#include "place_rows.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, int kIndex>
__device__ __forceinline__ void HopperForward<T, kBias, kMask, kIndex>::find_and_fill(
    const AttentionForwardParams& params, const Memory& memory, WorkOfBlock& work) {
  uint32_t first_step = 0;  // steps of the tiles of queries before
  extern __shared__ __align__(1024) char shared_memory[];
  const bool is_first = threadIdx.x % 32 == 0;
  const int finder = static_cast<int>(threadIdx.x) / 32 - 1;
  if (finder >= Memory::kFinders) return;
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
    if constexpr (Memory::kHasFillers) {
      if (!kIsUnmasked) memory.ranges_are_there().wait(done & 1);
      const Queries queries = queries_of(params, work, assigned);
      [[maybe_unused]] const BiasRows<T> bias(params, queries.batch, queries.head);
      // Of this warp's rows that begin anywhere, the shift of the first one, and how many there
      // are.
      [[maybe_unused]] int shift = 0, rows = 0;
      if constexpr (Memory::kIsRows) {
        int batch, head;
        params.entry_of_bias(queries.batch, queries.head, batch, head);
        shift = uniform(
            RowsAnywhere(params.bias)
                .shift(batch * params.bias.batch_stride + head * params.bias.head_stride, 0));
        rows = uniform(params.queries - queries.query_of(params, finder));
      }
      TilesToCopy tiles(params, queries, assigned, first_step);
      for (; tiles.are_left(); tiles.advance(params, queries, assigned)) {
        const int stage = tiles.step % Memory::kBiasStages;
        if constexpr (Memory::kIsTable) {
          Memory::diagonals(shared_memory, stage)
              .template fill<32 * Memory::kFillers>(
                  static_cast<int>(threadIdx.x) - 32, bias, queries.first_query, tiles.key,
                  params.queries, params.keys, [&] {
                    memory.bias_is_used(stage, 0).wait((tiles.step / Memory::kBiasStages & 1) ^ 1);
                  });
        } else {
          memory.rows_are_there(stage, finder).wait(tiles.step / Memory::kBiasStages & 1);
          if (rows > 0) place_rows_anywhere(params, memory.bias(stage, finder), shift, rows);
        }
        __syncwarp();  // all lanes have written theirs
        if (is_first) memory.bias_is_there(stage, Memory::kIsTable ? 0 : finder).arrive();
      }
      first_step = uniform(tiles.step);
      if constexpr (!kIsUnmasked) {
        __syncwarp();  // all lanes have read what is assigned
        if (is_first) memory.tile_is_done().arrive();
      }
    }
  }
}

}  // namespace megasoftmax
