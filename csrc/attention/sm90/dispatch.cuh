#pragma once
// From a plan to one of Hopper's kernels.

#include "../../common/device.h"
#include "../../common/launch.cuh"
#include "../../common/registration.h"
#include "../attention.h"
#include "../launches.cuh"
#include "backward_heads.cuh"
#include "backward_wide.cuh"
#include "bias_gradient.cuh"
#include "forward.cuh"
#include "forward_heads.cuh"
#include "plan.h"
#include "tensor_map.h"

namespace megasoftmax {

// Launches so many blocks of a forward kernel for the tiles of all heads and batches.
template <class Maps>
cudaError_t launch_with_maps(void (*kernel)(AttentionForwardParams, Maps), int64_t tiles,
                             int64_t heads, int64_t blocks, int threads, int shared_bytes,
                             cudaStream_t stream, AttentionForwardParams params, const Maps& maps) {
  const int64_t items = tiles * heads * params.batches;
  if (items > INT32_MAX) return cudaErrorInvalidValue;
  // Blocks that know their tiles from the start get tiles of all lengths, also without sections.
  const Device& device = current_device();
  const bool is_known = !lengths_may_differ(params) && params.tile_counter == nullptr;
  params.order = TileOrder(tiles, params.batches,
                           heads_of_section(params, heads, params.batches, bytes_of_head(params),
                                            blocks < items && is_known ? 0 : device.cache_bytes, 1,
                                            device.multiprocessors));
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                shared_bytes, Together::kNot, 1, stream, params, maps);
}

// Maps of queries and gradients of outputs, and of keys and values.
inline cudaError_t make_map_of_queries(CUtensorMap& map, const AttentionParams& params,
                                       const Strided& tensor, int columns, int box_rows) {
  return make_tensor_map(map, tensor, params.batches, params.heads, params.queries, columns,
                         box_rows);
}
inline cudaError_t make_map_of_keys(CUtensorMap& map, const AttentionParams& params,
                                    const Strided& tensor, int columns, int box_rows) {
  return make_tensor_map(map, tensor, params.batches, params.key_heads, params.keys, columns,
                         box_rows);
}

inline cudaError_t make_map_of_bias(CUtensorMap& map, const AttentionParams& params,
                                    const Strided& tensor, int box_rows) {
  return make_tensor_map(map, tensor, params.bias_batches(), params.bias_heads(), params.queries,
                         params.keys, box_rows);
}

// For launches with such a bias.
template <class T, HopperBias kBias>
cudaError_t launch_hopper_forward(const ForwardLaunch& launch, cudaStream_t stream) {
  const ForwardPlan& plan = launch.plan;
  return with_regime(kAttentionHopperTiles, plan.tile, [&]<int kIndex>() {
    if constexpr (!takes_bias(kAttentionHopperTiles[kIndex], kBias)) {
      return cudaErrorInvalidValue;
    } else {
      using Memory = HopperMemory<kBias, kIndex>;
      AttentionForwardParams params = launch.params;
      params.heads_of_block = plan.heads_of_block;
      params.blocks_of_heads = Divider(plan.heads / params.key_heads);
      // A block mask has tiles from query 0 on.
      if (plan.splits.count == 1 && plan.heads_of_block == 1 && params.block_mask.words == nullptr)
        params.query_tile_offset = static_cast<int>(plan.row_tiles) * Memory::kQueries -
                                   64 * divide_up(params.queries, 64);
      if (params.tile_counter != nullptr)
        MEGASOFTMAX_RETURN_IF_ERROR(
            cudaMemsetAsync(params.tile_counter, 0, sizeof(*params.tile_counter), stream));
      constexpr HopperMask kKeyMask = Memory::kHasMasked ? HopperMask::kKeys : HopperMask::kAny;
      const HopperMask mask = hopper_mask(params, Memory::kTile);
      // Kernels for a mask of keys alone add a bias of keys.
      constexpr bool kIsOfKeys = kBias == HopperBias::kKeys;
      constexpr HopperMask kWithout = kIsOfKeys ? kKeyMask : HopperMask::kNone,
                           kWithAny = kIsOfKeys ? kKeyMask : HopperMask::kAny;
      const auto kernel =
          mask == HopperMask::kNone   ? attention_hopper_forward_kernel<T, kBias, kWithout, kIndex>
          : mask == HopperMask::kKeys ? attention_hopper_forward_kernel<T, kBias, kKeyMask, kIndex>
                                      : attention_hopper_forward_kernel<T, kBias, kWithAny, kIndex>;
      // Before the maps, because it gives a new thread its context.
      MEGASOFTMAX_RETURN_IF_ERROR(allow_shared_memory(kernel, Memory::kBytes));
      TensorMaps maps;
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_map_of_queries(maps.query, params, params.query, params.head_dim, 64));
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_map_of_keys(maps.key, params, params.key, params.head_dim, Memory::kKeys));
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_map_of_keys(maps.value, params, params.value, params.value_dim, Memory::kKeys));
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_map_of_queries(maps.output, params, params.output, params.value_dim, 16));
      if constexpr (kBias == HopperBias::kTile)
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_bias(maps.bias, params, params.bias, 64));
      if constexpr (kBias == HopperBias::kRows)
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_rows_anywhere(
            maps.bias, params.bias, params.bias_batches(), params.bias_heads(), params.queries,
            params.keys, 64, Memory::kKeys));
      return launch_with_maps(kernel, plan.splits.count * plan.row_tiles, plan.heads, plan.blocks,
                              Memory::kThreads, Memory::kBytes, stream, params, maps);
    }
  });
}

template <class T>
cudaError_t launch_heads_forward(const ForwardLaunch& launch, cudaStream_t stream) {
  const auto& [params, plan] = launch;
  return with_regime(kAttentionHopperHeadsForwardTiles, plan.tile, [&]<int kIndex>() {
    const auto launch_with = [&]<bool kHasMask>() {
      using Memory = HopperHeadsForwardMemory<kHasMask, kIndex>;
      const auto kernel = attention_hopper_heads_forward_kernel<T, kHasMask, kIndex>;
      if (plan.blocks > INT32_MAX) return cudaErrorInvalidValue;
      // Before the maps, because it gives a new thread its context.
      MEGASOFTMAX_RETURN_IF_ERROR(allow_shared_memory(kernel, Memory::kBytes));
      HeadsForwardMaps maps;
      const auto make = [&](CUtensorMap& map, const Strided& tensor, int64_t heads, int rows,
                            int columns, int box_rows) {
        return make_tensor_map(map, tensor, params.batches, heads, rows, columns, box_rows,
                               Memory::kRowBytes);
      };
      MEGASOFTMAX_RETURN_IF_ERROR(make(maps.query, params.query, params.heads, params.queries,
                                       params.head_dim, Memory::kBox));
      MEGASOFTMAX_RETURN_IF_ERROR(
          make(maps.key, params.key, params.key_heads, params.keys, params.head_dim, Memory::kBox));
      MEGASOFTMAX_RETURN_IF_ERROR(make(maps.value, params.value, params.key_heads, params.keys,
                                       params.value_dim, Memory::kBox));
      MEGASOFTMAX_RETURN_IF_ERROR(
          make(maps.output, params.output, params.heads, params.queries, params.value_dim, 16));
      return megasoftmax::launch(kernel, dim3(static_cast<unsigned>(plan.blocks)),
                                 dim3(static_cast<unsigned>(plan.threads)), Memory::kBytes,
                                 Together::kNot, 1, stream, params, maps);
    };
    return params.mask.data != nullptr ? launch_with.template operator()<true>()
                                       : launch_with.template operator()<false>();
  });
}

template <class T, HopperBias kBias, HopperMask kMask, int kIndex, bool kHasTurns = false>
constexpr auto hopper_backward_kernel() {
  if constexpr (kAttentionHopperBackwardTiles[kIndex].is_wide()) {
    return attention_hopper_wide_backward_kernel<T, kBias == HopperBias::kSoftcap,
                                                 kMask == HopperMask::kNone, kHasTurns, kIndex>;
  } else {
    return attention_hopper_backward_kernel<T, kBias, kMask, kHasTurns, kIndex>;
  }
}

// All but the bias. `box_queries`, `box_keys`: rows of a box. `row_bytes`: 64 or 128.
inline cudaError_t make_narrow_maps(NarrowTensorMaps& maps, const AttentionBackwardParams& params,
                                    int box_queries, int box_keys, int row_bytes) {
  const auto make = [&](CUtensorMap& map, const Strided& tensor, int64_t heads, int rows,
                        int columns, int box_rows) {
    return make_tensor_map(map, tensor, params.batches, heads, rows, columns, box_rows, row_bytes);
  };
  MEGASOFTMAX_RETURN_IF_ERROR(
      make(maps.query, params.query, params.heads, params.queries, params.head_dim, box_queries));
  MEGASOFTMAX_RETURN_IF_ERROR(make(maps.output_gradient, params.output_gradient, params.heads,
                                   params.queries, params.value_dim, box_queries));
  MEGASOFTMAX_RETURN_IF_ERROR(
      make(maps.key, params.key, params.key_heads, params.keys, params.head_dim, box_keys));
  return make(maps.value, params.value, params.key_heads, params.keys, params.value_dim, box_keys);
}

template <class T>
cudaError_t launch_heads_backward(const BackwardLaunch& launch, cudaStream_t stream) {
  return with_regime(kAttentionHopperHeadsTiles, launch.plan.tile, [&]<int kIndex>() {
    const auto launch_with = [&]<bool kHasBias>() {
      using Memory = HopperHeadsMemory<kHasBias, kIndex>;
      const auto kernel = attention_hopper_heads_backward_kernel<T, kHasBias, kIndex>;
      MEGASOFTMAX_RETURN_IF_ERROR(allow_shared_memory(kernel, Memory::kBytes));
      AttentionBackwardParams params = launch.params;
      params.order = TileOrder(1, params.batches, 1);
      NarrowTensorMaps maps;
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_narrow_maps(maps, params, Memory::kQueries, 128, Memory::kRowBytes));
      if constexpr (kHasBias)
        MEGASOFTMAX_RETURN_IF_ERROR(
            make_map_of_bias(maps.bias, params, params.bias, Memory::kQueries));
      return megasoftmax::launch(kernel, dim3(static_cast<unsigned>(launch.plan.blocks)),
                                 dim3(static_cast<unsigned>(launch.plan.threads)), Memory::kBytes,
                                 Together::kOverlapping, 1, stream, params, maps);
    };
    return launch.params.bias.data != nullptr ? launch_with.template operator()<true>()
                                              : launch_with.template operator()<false>();
  });
}

template <class T>
cudaError_t launch_hopper_bias_gradient(const BackwardLaunch& launch, cudaStream_t stream) {
  const AttentionBackwardParams& params = launch.params;
  return with_regime(
      kAttentionHopperBiasGradientTiles, launch.plan.in_order.tile, [&]<int kIndex>() {
        using Memory = HopperBiasGradientMemory<kIndex>;
        const HopperMask mask = hopper_mask_in_order(params);
        // hopper_bias_gradient_plan takes no other tile for HopperMask::kAny, which dropout needs.
        constexpr bool kTakesAny = Memory::kTile.takes_any_mask();
        constexpr HopperMask kWidest = kTakesAny ? HopperMask::kAny : HopperMask::kKeys;
        const auto kernel =
            mask == HopperMask::kNone
                ? attention_hopper_bias_gradient_kernel<T, HopperMask::kNone, false, kIndex>
            : mask == HopperMask::kKeys
                ? attention_hopper_bias_gradient_kernel<T, HopperMask::kKeys, false, kIndex>
            : params.dropout.is_given()
                ? attention_hopper_bias_gradient_kernel<T, kWidest, kTakesAny, kIndex>
                : attention_hopper_bias_gradient_kernel<T, kWidest, false, kIndex>;
        MEGASOFTMAX_RETURN_IF_ERROR(allow_shared_memory(kernel, Memory::kBytes));
        // The index of a tile and the number of blocks are added.
        if (TileOfBias<Memory>::count(params) > INT32_MAX / 2) return cudaErrorInvalidValue;
        const int64_t tiles = TileOfBias<Memory, true>::count(params);
        const int64_t room = current_device().multiprocessors;
        const int64_t blocks = Memory::kTile.is_persistent() ? std::min(tiles, room) : tiles;
        NarrowTensorMaps maps;
        MEGASOFTMAX_RETURN_IF_ERROR(
            make_narrow_maps(maps, params, Memory::kQueries, Memory::kKeys, Memory::kRowBytes));
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_bias(maps.bias, params, params.bias, 64));
        return megasoftmax::launch(kernel, dim3(static_cast<unsigned>(blocks)),
                                   dim3(Memory::kTile.threads()), Memory::kBytes,
                                   Together::kOverlapping, 1, stream, params, maps);
      });
}

// For launches with such a bias, and a mask that is one of kMasks.
template <class T, HopperBias kBias, HopperMask... kMasks>
cudaError_t launch_hopper_backward(const BackwardLaunch& launch, cudaStream_t stream) {
  const auto& [params, plan] = launch;
  return with_regime(kAttentionHopperBackwardTiles, plan.tile, [&]<int kIndex>() {
    if constexpr (!takes_bias(kAttentionHopperBackwardTiles[kIndex], kBias)) {
      return cudaErrorInvalidValue;
    } else {
      constexpr bool kIsWide = kAttentionHopperBackwardTiles[kIndex].is_wide();
      using Memory = std::conditional_t<kIsWide, HopperWideBackwardMemory<kIndex>,
                                        HopperBackwardMemory<kBias, kIndex>>;
      // The warpgroup adds its 64 rows of dQ at once, or each warp its 16.
      constexpr int kSumRows = kIsWide ? 16 : 64;
      const int cluster = plan.bias_gradient == BiasGradient::kInClusters
                              ? static_cast<int>(params.batches_per_bias.divisor)
                              : 1;
      Strided sums = contiguous(params.heads, params.queries, params.head_dim);
      sums.data = params.query_gradient_sum;
      BackwardTensorMaps maps;
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_map_of_queries(maps.query, params, params.query, params.head_dim, Memory::kQueries));
      MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_queries(maps.output_gradient, params,
                                                      params.output_gradient, params.value_dim,
                                                      Memory::kQueries));
      MEGASOFTMAX_RETURN_IF_ERROR(make_tensor_map(maps.query_gradient_sum, sums,
                                                  params.query_sums * params.batches, params.heads,
                                                  params.queries, params.head_dim, kSumRows));
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_map_of_keys(maps.key, params, params.key, params.head_dim, Memory::kKeys));
      MEGASOFTMAX_RETURN_IF_ERROR(
          make_map_of_keys(maps.value, params, params.value, params.value_dim, Memory::kKeys));
      if (params.sections_apart != 0) {
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_queries(maps.output_piece, params, params.output,
                                                        params.value_dim, kRowsOfWorkerPiece));
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_queries(maps.output_gradient_piece, params,
                                                        params.output_gradient, params.value_dim,
                                                        kRowsOfWorkerPiece));
      }
      if constexpr (kBias == HopperBias::kTile)
        MEGASOFTMAX_RETURN_IF_ERROR(
            make_map_of_bias(maps.bias, params, params.bias, Memory::kQueries));
      if constexpr (kBias == HopperBias::kRows)
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_rows_anywhere(
            maps.bias, params.bias, params.bias_batches(), params.bias_heads(), params.queries,
            params.keys, Memory::kPieceRows, Memory::kKeys));
      if constexpr (is_dense(kBias)) {
        if (params.bias_gradient_kind == BiasGradient::kDense) {
          Strided gradient = contiguous(params.heads, params.queries, params.bias_pitch());
          gradient.data = params.bias_gradient;
          gradient.type = params.bias.type;
          MEGASOFTMAX_RETURN_IF_ERROR(
              make_map_of_bias(maps.bias_gradient, params, gradient, Memory::kQueries));
        }
      }
      const auto launch_kernel = [&]<HopperMask kMask, bool kHasTurns>() {
        constexpr bool kMayHaveRowWorker =
            !kIsWide && is_unbiased(kBias) && kMask != HopperMask::kAny;
        if (plan.blocks > INT32_MAX || (params.sections_apart != 0 && !kMayHaveRowWorker))
          return cudaErrorInvalidValue;
        return megasoftmax::launch(
            hopper_backward_kernel<T, kBias, kMask, kIndex, kHasTurns>(),
            dim3(static_cast<unsigned>(plan.blocks)), dim3(Memory::kThreads), Memory::kBytes,
            cluster == 1 ? Together::kNot : Together::kInClusters, cluster, stream, params, maps);
      };
      return with_one_of<kMasks...>(hopper_mask(params), [&]<HopperMask kMask>() {
        // Instances without kHasTurns take turns, too, if params.turns is given. Above a head
        // dimension of 128, those with it have OrderOfTurns::kFirstKeysFirst, which would make the
        // others slower.
        constexpr bool kIsWide = kAttentionHopperBackwardTiles[kIndex].is_wide();
        // With turns, a relative bias beside a mask of keys takes the kernel for all masks: see
        // hopper_mask.
        constexpr bool kHasInstanceForTurns =
            !kIsWide && (is_bias(kBias) || kMask == HopperMask::kAny) &&
            !(kBias == HopperBias::kTable && kMask == HopperMask::kKeys);
        if constexpr (kIsWide && kMask == HopperMask::kNone) {
          if (params.order_of_turns == OrderOfTurns::kFirstKeysFirst)
            return launch_kernel.template operator()<kMask, true>();
        } else if constexpr (kHasInstanceForTurns) {
          if (params.turns != nullptr) return launch_kernel.template operator()<kMask, true>();
        }
        return launch_kernel.template operator()<kMask, false>();
      });
    }
  });
}

}  // namespace megasoftmax
