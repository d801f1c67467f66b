#pragma once
// From a plan to one of Hopper's kernels.

#include "../../common/device.h"
#include "../../common/launch.cuh"
#include "../plan.h"
#include "backward_wide.cuh"
#include "forward.cuh"
#include "tensor_map.h"

namespace megasoftmax {

// Whether the kernel was compiled for 9.0a. Code of another architecture has no body of it, which
// needs next to no registers.
template <class Kernel>
bool has_code(Kernel* kernel) {
  constexpr int kRegistersOfNothing = 32;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess)
    return attributes.numRegs > kRegistersOfNothing;
  cudaGetLastError();  // the kernels of all architectures are left
  return false;
}

// A block for each of so many tiles of each head and batch, but at most so many blocks. Those that
// follow each other are in clusters of `cluster`, unless that is 1.
template <class Params, class Maps>
cudaError_t launch_with_maps(void (*kernel)(Params, Maps), int64_t tiles, int64_t heads,
                             int64_t most_blocks, int cluster, int threads, int shared_bytes,
                             cudaStream_t stream, Params params, const Maps& maps) {
  const int64_t items = tiles * heads * params.batches;
  if (items > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t blocks = std::min(items, most_blocks);
  // Blocks that know their tiles from the start get all lengths of them without sections.
  const Device& device = current_device();
  const bool is_known = !has_unknown_lengths(params);
  params.order = TileOrder(tiles, params.batches,
                           heads_of_section(params, heads, params.batches, bytes_of_head(params),
                                            blocks < items && is_known ? 0 : device.cache_bytes,
                                            device.multiprocessors));
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                shared_bytes, cluster == 1 ? Together::kNot : Together::kInClusters, cluster,
                stream, params, maps);
}

// Of queries and gradients of outputs, and of keys and values.
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

// Calls body.operator()<bias>().
template <class Body>
cudaError_t with_hopper_bias(HopperBias bias, Body&& body) {
  switch (bias) {
    case HopperBias::kNone:
      return body.template operator()<HopperBias::kNone>();
    case HopperBias::kTile:
      return body.template operator()<HopperBias::kTile>();
    case HopperBias::kTable:
      return body.template operator()<HopperBias::kTable>();
  }
  return cudaErrorInvalidValue;
}

template <class T>
bool attention_hopper_forward_is_there(int index, HopperBias bias) {
  bool is_there = false;
  with_regime(kAttentionHopperTiles, index, [&]<int kIndex>() {
    return with_hopper_bias(bias, [&]<HopperBias kBias>() {
      if constexpr (takes_bias(kAttentionHopperTiles[kIndex], kBias)) {
        static const bool has_kernels =
            has_code(attention_hopper_forward_kernel<T, kBias, false, kIndex>) &&
            has_code(attention_hopper_forward_kernel<T, kBias, true, kIndex>);
        is_there = has_kernels;
      }
      return cudaSuccess;
    });
  });
  return is_there;
}

template <class T>
cudaError_t attention_hopper_forward_instance(const AttentionForwardParams& params, int index,
                                              cudaStream_t stream) {
  return with_regime(kAttentionHopperTiles, index, [&]<int kIndex>() {
    return with_hopper_bias(hopper_bias(params), [&]<HopperBias kBias>() {
      if constexpr (!takes_bias(kAttentionHopperTiles[kIndex], kBias)) {
        return cudaErrorInvalidValue;
      } else {
        using Memory = HopperMemory<kBias, kIndex>;
        AttentionForwardParams launched = params;
        int most_blocks = INT32_MAX;
        if (shares_blocks(params) || params.tiles_taken != nullptr)
          MEGASOFTMAX_RETURN_IF_ERROR(
              attribute_of_device(cudaDevAttrMultiProcessorCount, most_blocks));
        const int64_t row_tiles = divide_up(params.queries, Memory::kQueries);
        const int64_t tiles = params.splits * row_tiles;
        const int64_t heads = hopper_blocks_of_heads(params, Memory::kTile);
        launched.row_tiles = Divider(row_tiles);
        launched.heads_of_block = hopper_heads_of_block(params, Memory::kTile);
        launched.blocks_of_heads = Divider(heads / params.key_heads);
        // A note of a mask is of tiles from the first query on.
        if (params.splits == 1 && launched.heads_of_block == 1 && params.note.words == nullptr)
          launched.lead =
              static_cast<int>(row_tiles) * Memory::kQueries - 64 * divide_up(params.queries, 64);
        if (tiles * heads * params.batches <= most_blocks)
          launched.tiles_taken = nullptr;  // each block has one
        if (launched.tiles_taken != nullptr)
          MEGASOFTMAX_RETURN_IF_ERROR(
              cudaMemsetAsync(launched.tiles_taken, 0, sizeof(*launched.tiles_taken), stream));
        const auto kernel = is_plain(params)
                                ? attention_hopper_forward_kernel<T, kBias, true, kIndex>
                                : attention_hopper_forward_kernel<T, kBias, false, kIndex>;
        // Before the maps: it gives a new thread its context.
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
        return launch_with_maps(kernel, tiles, heads, most_blocks, 1, Memory::kThreads,
                                Memory::kBytes, stream, launched, maps);
      }
    });
  });
}

template <class T, HopperBias kBias, bool kIsPlain, int kIndex, bool kHasTurns = false>
constexpr auto hopper_backward_kernel() {
  if constexpr (kAttentionHopperBackwardTiles[kIndex].is_wide()) {
    return attention_hopper_wide_backward_kernel<T, kIsPlain, kIndex>;
  } else {
    return attention_hopper_backward_kernel<T, kBias, kIsPlain, kHasTurns, kIndex>;
  }
}

template <class T>
bool attention_hopper_backward_is_there(int index, HopperBias bias) {
  bool is_there = false;
  with_regime(kAttentionHopperBackwardTiles, index, [&]<int kIndex>() {
    return with_hopper_bias(bias, [&]<HopperBias kBias>() {
      if constexpr (takes_bias(kAttentionHopperBackwardTiles[kIndex], kBias)) {
        static const bool has_kernels =
            has_code(hopper_backward_kernel<T, kBias, false, kIndex>()) &&
            has_code(hopper_backward_kernel<T, kBias, true, kIndex>());
        is_there = has_kernels;
      }
      return cudaSuccess;
    });
  });
  return is_there;
}

template <class T>
cudaError_t attention_hopper_backward_instance(const AttentionBackwardParams& params, int index,
                                               cudaStream_t stream) {
  return with_regime(kAttentionHopperBackwardTiles, index, [&]<int kIndex>() {
    return with_hopper_bias(hopper_bias(params), [&]<HopperBias kBias>() {
      if constexpr (!takes_bias(kAttentionHopperBackwardTiles[kIndex], kBias)) {
        return cudaErrorInvalidValue;
      } else {
        constexpr bool kIsWide = kAttentionHopperBackwardTiles[kIndex].is_wide();
        using Memory = std::conditional_t<kIsWide, HopperWideBackwardMemory<kIndex>,
                                          HopperBackwardMemory<kBias, kIndex>>;
        // A warpgroup adds its rows of dQ together, or each warp its own.
        constexpr int kSumRows = kIsWide ? 16 : 64;
        const int cluster = params.bias_gradient_kind == BiasGradient::kInClusters
                                ? static_cast<int>(params.batches_per_bias.divisor)
                                : 1;
        Strided sums = contiguous(params.heads, params.queries, params.head_dim);
        sums.data = params.query_gradient_sum;
        BackwardTensorMaps maps;
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_queries(maps.query, params, params.query,
                                                        params.head_dim, Memory::kQueries));
        MEGASOFTMAX_RETURN_IF_ERROR(make_map_of_queries(maps.output_gradient, params,
                                                        params.output_gradient, params.value_dim,
                                                        Memory::kQueries));
        MEGASOFTMAX_RETURN_IF_ERROR(
            make_map_of_queries(maps.query_gradient_sum, params, sums, params.head_dim, kSumRows));
        MEGASOFTMAX_RETURN_IF_ERROR(
            make_map_of_keys(maps.key, params, params.key, params.head_dim, Memory::kKeys));
        MEGASOFTMAX_RETURN_IF_ERROR(
            make_map_of_keys(maps.value, params, params.value, params.value_dim, Memory::kKeys));
        if constexpr (kBias == HopperBias::kTile) {
          MEGASOFTMAX_RETURN_IF_ERROR(
              make_map_of_bias(maps.bias, params, params.bias, Memory::kQueries));
          if (params.bias_gradient_kind == BiasGradient::kDense) {
            Strided gradient = contiguous(params.heads, params.queries, params.keys);
            gradient.data = params.bias_gradient;
            gradient.type = params.bias.type;
            MEGASOFTMAX_RETURN_IF_ERROR(
                make_map_of_bias(maps.bias_gradient, params, gradient, Memory::kQueries));
          }
        }
        const auto launch_kernel = [&]<bool kHasTurns>() {
          return launch_with_maps(
              is_plain(params) ? hopper_backward_kernel<T, kBias, true, kIndex, kHasTurns>()
                               : hopper_backward_kernel<T, kBias, false, kIndex, kHasTurns>(),
              divide_up(params.keys, Memory::kKeys), params.key_heads, INT32_MAX, cluster,
              Memory::kThreads, Memory::kBytes, stream, params, maps);
        };
        return params.turns != nullptr ? launch_kernel.template operator()<true>()
                                       : launch_kernel.template operator()<false>();
      }
    });
  });
}

}  // namespace megasoftmax
