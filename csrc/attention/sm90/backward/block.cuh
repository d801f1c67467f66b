#pragma once
// The warps of a block of Hopper's backward: what they have in common, and their roles.

#include "../../exclusion.cuh"
#include "memory.cuh"

namespace megasoftmax {

// What a block owns: keys of a head and batch, and the tiles of queries that see some of them.
template <class Tiles>
struct BlockOfKeys {
  int first_key, key_head, batch;
  Tiles tiles;
};

template <class T, HopperBias kBias, HopperMask kMask, bool kHasTurns, int kIndex>
struct HopperBackward {
  static constexpr bool kMasksKeys = kMask == HopperMask::kKeys;
  // No masks, ranges or dropout are looked at. A mask of keys has code of its own.
  static constexpr bool kIsUnmasked = kMask != HopperMask::kAny;
  using Memory = HopperBackwardMemory<kBias, kIndex>;
  // Whether warps of the copying warpgroup add dQ to global memory, so that others do not wait for
  // it. They have other work with a relative bias, with a dense one whose gradient they sum, and
  // with rows that begin anywhere. The copying warpgroup would spill beside a dense bias, and
  // beside masks of pairs, ranges and dropout. Beside one of these, only instances for turns have
  // adding warps. Beside both, none has.
  static constexpr bool kMayHaveAddingWarps =
      is_bias(kBias) ? kBias == HopperBias::kTile && kIsUnmasked && kHasTurns
                     : kIsUnmasked || kHasTurns;
  __device__ static bool has_adding_warps(const BiasGradientSums<kBias>& sums) {
    return kMayHaveAddingWarps && !sums.is_added && !sums.is_in_cluster;
  }
  static constexpr bool kHasTile = is_dense(kBias);
  static constexpr bool kHasTable = kBias == HopperBias::kTable;
  static constexpr int kDim = Memory::kDim, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  static constexpr int kStages = Memory::kStages, kWarpgroups = Memory::kWarpgroups;
  // Whether the last warp of the copying warpgroup may be a row worker.
  static constexpr bool kMayHaveRowWorker = Memory::kHasRowWorker && kIsUnmasked;
  static_assert(!kMayHaveRowWorker || (kMayHaveAddingWarps && kWarpgroups == 2));
  static constexpr bool kMayAlternate = may_alternate(kBias, kMask);
  static_assert(!kMayAlternate || !kHasTurns);  // the adding warps alone take turns
  using Block = BlockOfKeys<QueryTiles<kKeys, kQueries, kIsUnmasked, false, kMayAlternate>>;

  // All work of a warp: of the copying warpgroup in copy.cuh, add_query_gradients.cuh,
  // dense_bias_gradient.cuh, place_rows.cuh and row_worker.cuh, of the others in products.cuh.
  // Arguments are no members: with members in their place, ptxas spills more.
  __device__ static void copy(const AttentionBackwardParams& params, const BackwardTensorMaps& maps,
                              const Memory& memory, const BiasGradientSums<kBias>& bias_sums,
                              const Block& block);
  __device__ static void make_dense_bias_gradient(const AttentionBackwardParams& params,
                                                  const Memory& memory,
                                                  const BiasGradientSums<kBias>& bias_sums,
                                                  const Block& block);
  __device__ static void place_rows_anywhere(const AttentionBackwardParams& params,
                                             const Memory& memory, const Block& block);
  __device__ static void add_query_gradients(const AttentionBackwardParams& params,
                                             const BackwardTensorMaps& maps, const Memory& memory,
                                             const Block& block);
  // kSumColumns: the columns of dQ that this warpgroup makes.
  template <int kSumColumns>
  __device__ static void multiply(const AttentionBackwardParams& params,
                                  const BackwardTensorMaps& maps, const Memory& memory,
                                  const BiasGradientSums<kBias>& bias_sums, const Block& block,
                                  int warpgroup);
};

}  // namespace megasoftmax
