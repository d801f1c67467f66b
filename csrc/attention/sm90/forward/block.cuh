#pragma once
// The warps of a block of Hopper's forward: what they have in common, and the role of the copying
// warpgroup. ../forward.cuh has the role of the others, the products.

#include "memory.cuh"
#include "schedule.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, int kIndex>
struct HopperForward {
  static constexpr bool kMasksKeys = kMask == HopperMask::kKeys;
  // No masks, ranges or dropout are looked at. A mask of keys has code of its own.
  static constexpr bool kIsUnmasked = kMask != HopperMask::kAny;
  using Memory = HopperMemory<kBias, kIndex>;
  static constexpr int kDim = Memory::kDim, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  static constexpr int kStages = Memory::kStages, kWarpgroups = Memory::kWarpgroups;
  static constexpr bool kHasBias = is_bias(kBias);
  static constexpr bool kBiasesKeys = kBias == HopperBias::kKeys;
  static constexpr bool kHasTile = is_dense(kBias);
  using TilesToCopy = TilesOfBlock<kQueries, kKeys, kMask>;
  using Tiles = std::conditional_t<kIsUnmasked, TilesToCopy, FollowedTiles>;
  using Queries = QueriesOfBlock<kIsUnmasked && !kHasBias>;

  // All work of a warp of the copying warpgroup, in copy.cuh and find_and_fill.cuh. Arguments are
  // no members: with members in their place, ptxas spills more.
  __device__ static void copy(const AttentionForwardParams& params, const TensorMaps& maps,
                              const Memory& memory, WorkOfBlock& work);
  __device__ static void find_and_fill(const AttentionForwardParams& params, const Memory& memory,
                                       WorkOfBlock& work);

  __device__ __forceinline__ static Queries queries_of(
      const AttentionForwardParams& params, const WorkOfBlock& work,
      const typename Memory::Assignment& assigned) {
    if constexpr (kIsUnmasked) {
      return Queries(params, kQueries, work.number());
    } else {
      return Queries(assigned.block);
    }
  }
  // Whether the block has another tile of queries, or may have one. If a launch is not unmasked,
  // the copying warp assigns the tiles, and other warps wait for it at the barrier `is_there`.
  __device__ __forceinline__ static bool may_come(const WorkOfBlock& work, Barrier is_there,
                                                  int done, int& number) {
    if constexpr (kIsUnmasked) {
      return work.may_come();
    } else {
      extern __shared__ __align__(1024) char shared_memory[];
      is_there.wait(done & 1);
      number = uniform(Memory::assignment(shared_memory, done).number);
      return number >= 0;
    }
  }
};

}  // namespace megasoftmax
