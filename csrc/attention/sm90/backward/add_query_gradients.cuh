#pragma once
// Adds dQ to the sums in global memory, or writes it, by one lane of a warp for each warpgroup that
// makes it: the warps after the copying one. So a warpgroup waits neither for a turn nor for the
// end of an addition.

#include "../../turns.cuh"
#include "block.cuh"
#include "row_worker.cuh"
#include "tile_steps.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, bool kHasTurns, int kIndex>
__device__ __forceinline__ void
HopperBackward<T, kBias, kMask, kHasTurns, kIndex>::add_query_gradients(
    const AttentionBackwardParams& params, const BackwardTensorMaps& maps, const Memory& memory,
    const Block& block) {
  extern __shared__ __align__(1024) char shared_memory[];
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 32)) - 1;
  if (threadIdx.x % 32 != 0) return;
  const auto take_all = [&]<bool kWrites>() {
    for (int step = 0;; ++step) {
      memory.sums_are_there(warpgroup).wait(step & 1);
      const auto [head, query] = Memory::tile_of_sums(shared_memory, warpgroup);
      if (head < 0) break;
      uint32_t* turn = nullptr;
      if (!kWrites && params.turns != nullptr) {
        turn = turn_of<kQueries>(params, block.batch, head, query, warpgroup);
        wait_for_turn(turn, turns_before<kKeys, kQueries, kIsUnmasked, false, kMayAlternate>(
                                params, block.batch, head, query, block.first_key));
        publish_writes_to_others();
      }
      start_sums<kWrites>(maps, memory, warpgroup, head, query,
                          params.batch_of_sums(block.batch, block.first_key / kKeys));
      wait_for_reads_of_stores();
      memory.sums_are_used(warpgroup).arrive();
      if (turn == nullptr) continue;
      wait_for_stores();
      publish_writes_to_others();
      pass_turn(turn);
    }
  };
  params.query_gradient_kind == QueryGradient::kWritten ? take_all.template operator()<true>()
                                                        : take_all.template operator()<false>();
  if (!kMayHaveRowWorker || params.sections_apart == 0) return;
  wait_for_stores();
  publish_writes_to_others();
  pass_turn(count_of(params, section_of_block(params), SectionCount::kSums));
}

}  // namespace megasoftmax
