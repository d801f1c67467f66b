#pragma once
// The copying warpgroup of Hopper's forward. Its first warp copies queries, keys, values and a
// dense bias to shared memory, and takes the next tile of queries.

#include "../rows_anywhere.cuh"
#include "block.cuh"
#include "find_and_fill.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, int kIndex>
__device__ __forceinline__ void HopperForward<T, kBias, kMask, kIndex>::copy(
    const AttentionForwardParams& params, const TensorMaps& maps, const Memory& memory,
    WorkOfBlock& work) {
  if (threadIdx.x >= 32) {
    if constexpr (Memory::kIsTable || kMask != HopperMask::kNone)
      find_and_fill(params, memory, work);
    return;
  }
  uint32_t first_step = 0;  // steps of the tiles of queries before
  extern __shared__ __align__(1024) char shared_memory[];
  const bool is_first = threadIdx.x % 32 == 0;
  uint32_t number = blockIdx.x;
  // Tells the other warps the number of a tile. The place held the tile assigned two tiles before,
  // which is not needed any more.
  const auto assign = [&](int done) {
    if (!is_first) return;
    Memory::assignment(shared_memory, done).number =
        work.has(number) ? static_cast<int>(number) : -1;
    memory.tile_is_assigned().arrive();
  };
  if constexpr (!kIsUnmasked) assign(0);
  int done = 0;
  for (; kIsUnmasked ? work.may_come() : work.has(number); work.advance()) {
    if (kIsUnmasked && !work.is_left()) continue;
    auto& assigned = Memory::assignment(shared_memory, done);
    const Queries queries(params, kQueries, kIsUnmasked ? work.number() : static_cast<int>(number));
    const auto copy_queries = [&] {
      memory.queries_are_used().wait((done & 1) ^ 1);
      if (!is_first) return;
      memory.queries_are_there().arrive_and_expect(kWarpgroups * Memory::kQueryBytes);
      for (int i = 0; i < kWarpgroups; ++i)
        start_copy_of_panels<Memory::kPanels>(
            memory.queries(done, i), maps.query, memory.queries_are_there(), 64,
            queries.query_of(params, i), queries.head_of(i), queries.batch);
    };
    if constexpr (Memory::kQueryStages > 1) copy_queries();
    if constexpr (!kIsUnmasked) memory.ranges_are_there().wait(done & 1);
    int key_head, rest;
    params.heads_per_key_head.split(queries.head, key_head, rest);
    TilesToCopy tiles(params, queries, assigned, first_step);
    if (!kIsUnmasked && is_first) assigned.first_key = tiles.are_left() ? tiles.key : kNoKey;
    const auto fill = [&]<int kPanels>(uint32_t shared, const CUtensorMap& map, Barrier there,
                                       Barrier used, uint32_t step, int key, auto&& tell) {
      used.wait((step / kStages & 1) ^ 1);
      tell();
      if (!is_first) return;
      there.arrive_and_expect(kPanels * Memory::kPanelBytes);
      start_copy_of_panels<kPanels>(shared, map, there, kKeys, key, key_head, queries.batch);
    };
    [[maybe_unused]] int bias_head, bias_batch;
    if constexpr (kHasTile)
      params.entry_of_bias(queries.batch, queries.head, bias_batch, bias_head);
    const auto fill_bias = [&](uint32_t step, int key) {
      const int stage = step % Memory::kBiasStages;
      const auto wait = [&](int i) {
        memory.bias_is_used(stage, i).wait((step / Memory::kBiasStages & 1) ^ 1);
        return memory.bias_is_there(stage, i);
      };
      if constexpr (Memory::kIsRows) {
        const CopyOfRowsAnywhere<64, kKeys> copy(params, bias_batch, bias_head, key);
        for (int i = 0; i < kWarpgroups; ++i) {
          const Barrier there = wait(i);
          __syncwarp();  // all lanes have waited
          copy.start(params, maps.bias, memory.bias(stage, i), there, queries.query_of(params, i));
        }
      } else {
        for (int i = 0; i < kWarpgroups; ++i) {
          const Barrier there = wait(i);
          if (!is_first) continue;
          there.arrive_and_expect(Memory::kBiasBytes);
          for (int panel = 0; panel < kKeys / 64; ++panel)
            start_copy_of_box(memory.bias(stage, i) + panel * Memory::kBiasPanelBytes, maps.bias,
                              there, key + 64 * panel, queries.query_of(params, i), bias_head,
                              bias_batch);
        }
      }
    };
    // In the order in which room becomes free: keys, then the values of the step before. In the
    // first step the queries come instead of values, unless they have a stage of their own. The
    // next tile is taken as late as possible, so that all blocks end at about the same time. Its
    // number is loaded while the warp waits for room. It is assigned in the place of the tile
    // before, when all warps are done with that.
    int key_before = 0;
    for (bool begins = true;; begins = false) {
      const uint32_t step = tiles.step;
      const int stage = step % kStages, key = tiles.key;
      const bool has_keys = tiles.are_left();
      [[maybe_unused]] const bool may_exclude = tiles.may_exclude();
      if (has_keys) tiles.advance(params, queries, assigned);
      [[maybe_unused]] const bool ends = !tiles.are_left() && (has_keys || begins);
      [[maybe_unused]] uint32_t next = 0;
      if constexpr (!kIsUnmasked) {
        if (ends) next = work.next(params);
      }
      if (has_keys) {
        fill.template operator()<Memory::kPanels>(
            memory.keys(stage), maps.key, memory.keys_are_there(stage), memory.keys_are_used(stage),
            step, key, [&] {
              if (!kIsUnmasked && is_first)
                Memory::step(shared_memory, stage) =
                    FollowedTiles::told(tiles.are_left() ? tiles.key : kNoKey, may_exclude);
            });
      }
      if (begins) {
        if constexpr (Memory::kQueryStages == 1) copy_queries();
        if (!kIsUnmasked && is_first) memory.queries_are_there().arrive();
      } else {
        const int before = (step - 1) % kStages;
        fill.template operator()<Memory::kValuePanels>(
            memory.values(before), maps.value, memory.values_are_there(before),
            memory.values_are_used(before), step - 1, key_before, [] {});
      }
      if constexpr (!kIsUnmasked) {
        if (ends) {
          number = __shfl_sync(~0u, next, 0);
          memory.wait_until_tile_before_is_done(done);
          __syncwarp();  // all lanes have waited
          if (is_first) memory.tile_is_done().arrive();
          assign(done + 1);
        }
      }
      if (!has_keys) break;
      if constexpr (kHasTile) fill_bias(step, key);
      key_before = key;
    }
    ++done;
    first_step = uniform(tiles.step);
  }
  if constexpr (!kIsUnmasked) {
    memory.queries_are_used().wait((done & 1) ^ 1);
    if (is_first) {
      memory.queries_are_there().arrive();
      memory.queries_are_there().arrive();
    }
  }
}

}  // namespace megasoftmax
