#pragma once
// Gradients of attention on Hopper, by products of warpgroups and tensor copies. sm80/backward.cuh
// has the formulas.
//
// One warp of a block copies. Two warpgroups have 64 keys each. Scores are transposed, so that
// products multiply weights and gradients of scores from registers with gradients of outputs and
// queries. dQ needs the gradients of scores in shared memory. Each warpgroup makes 64 rows of dQ
// from all keys, and a tensor copy adds them to the sums in global memory. Without a dense bias
// the second warpgroup is half a step behind the first, see HopperBackwardMemory::kIsStaggered.
//
// Gradients of scores take the place of the bias, with queries in rows: a warp writes only where it
// alone has read. So the same tile serves the gradient of the bias.
//
// The other warps of the copying warpgroup make the gradient of a dense bias. They clear it where
// no tile is. If a cluster of blocks has one of the batches that share the bias each, each block
// sums some rows of a tile, part by part as the others send theirs. Else they add to it by atomics.
//
// With a relative bias one of them fills in its entries for a tile. All four warps sum the
// gradients of scores along diagonals while the next tile runs.
//
// Two of them may add dQ to the sums in global memory, and wait for turns, where they have nothing
// else to do. The last one may be a row worker, see row_worker.cuh.
//
// With dropout and 128 queries in a tile, a warpgroup makes the dropout bits of the next tile while
// the products for dQ and dK run.

#include "backward/block.cuh"
#include "backward/copy.cuh"
#include "backward/memory.cuh"
#include "backward/products.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, bool kHasTurns, int kIndex>
__global__ void __launch_bounds__(HopperBackwardMemory<kBias, kIndex>::kThreads, 1)
    attention_hopper_backward_kernel(const __grid_constant__ AttentionBackwardParams params,
                                     const __grid_constant__ BackwardTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperBackwardMemory<kBias, kIndex>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;
  const BiasGradientSums<kBias> bias_sums(params);
  if (threadIdx.x == 0) memory.init_barriers(bias_sums);
  __syncthreads();
  let_next_launch_begin();
  if (bias_sums.is_in_cluster) {  // others arrive at its barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
  int first_key, key_head, batch;
  params.order.place(static_cast<int>(blockIdx.x), first_key, key_head, batch);
  if (params.order_of_turns == OrderOfTurns::kLastKeysFirst)
    first_key = params.order.tiles - 1 - first_key;
  first_key *= Memory::kKeys;
  using Roles = HopperBackward<T, kBias, kMask, kHasTurns, kIndex>;
  typename Roles::Block block{first_key, key_head, batch, {params, batch, key_head, first_key}};
  if constexpr (Roles::kMasksKeys) {
    static_assert(Memory::kKeys == 2 * kMaskTile);
    const int tile = first_key / kMaskTile;
    if (params.block_mask.words != nullptr && params.turns == nullptr && block.tiles.are_left() &&
        !is_seen(params, batch, block.tiles.head, 0, tile) &&
        !is_seen(params, batch, block.tiles.head, 0, tile + 1))
      block.tiles.skip_all();
  }
  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers>();
    Roles::copy(params, maps, memory, bias_sums, block);
    return;
  }
  take_registers<Memory::kTile.registers>();
  // Two copies of a kernel with dropout would not fit into the instruction cache.
  constexpr int kFirst = Memory::sum_columns(0), kLast = Memory::sum_columns(Memory::kPanels - 1);
  if constexpr (kFirst != kLast && kMask != HopperMask::kAny) {
    if (Memory::column_panel(warpgroup) > 0) {
      Roles::template multiply<kLast>(params, maps, memory, bias_sums, block, warpgroup);
      return;
    }
  }
  Roles::template multiply<kFirst>(params, maps, memory, bias_sums, block, warpgroup);
#endif
}

}  // namespace megasoftmax
