#pragma once
// From a plan to one kernel.

#include "../common/device.h"
#include "../common/launch.cuh"
#include "instances/instances.h"
#include "parts.cuh"
#include "plan.h"
#include "sm80/backward.cuh"
#include "sm80/bias_gradient_in_order.cuh"
#include "sm80/decode.cuh"
#include "sm80/forward.cuh"
#include "sm80/query_gradient.cuh"
#include "sm80/wide.cuh"

namespace megasoftmax {

// Calls body.operator()<kind>() for the kind of bias of a launch of T.
template <class T, class Body>
cudaError_t with_bias_kind(const AttentionParams& params, Body&& body) {
  switch (bias_kind(params)) {
    case BiasKind::kNone:
      return body.template operator()<BiasKind::kNone>();
    case BiasKind::kTile:
      if constexpr (sizeof(T) == 2) return body.template operator()<BiasKind::kTile>();
      break;
    case BiasKind::kAny:
      return body.template operator()<BiasKind::kAny>();
  }
  return cudaErrorInvalidValue;
}

// Calls body.operator()<index>() for a row of a table of tiles that is for T and such a bias.
template <class T, const auto& kTiles, BiasKind kBias, class Body>
cudaError_t with_tile(int index, Body&& body) {
  return with_regime(kTiles, index, [&]<int kIndex>() -> cudaError_t {
    if constexpr (kTiles[kIndex].element_bytes == sizeof(T) && is_taken(kTiles, kIndex, kBias)) {
      return body.template operator()<kIndex>();
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

// Launches so many blocks for each head and batch. With more than one split, x is the split and y
// such a block.
template <class Params>
cudaError_t launch_tiles(void (*kernel)(Params), int64_t tiles, int64_t heads, int64_t batches,
                         int threads, int shared_bytes, cudaStream_t stream, Params params,
                         int splits = 1, Together together = Together::kNot) {
  const int64_t blocks = tiles * heads * batches;
  if (blocks == 0) return cudaSuccess;
  if (blocks > (splits == 1 ? INT32_MAX : UINT16_MAX)) return cudaErrorInvalidValue;
  params.order = TileOrder(tiles, batches,
                           heads_of_section(params, heads, batches, bytes_of_head(params),
                                            current_device().cache_bytes));
  const auto count = static_cast<unsigned>(blocks);
  return launch(kernel, splits == 1 ? dim3(count) : dim3(static_cast<unsigned>(splits), count),
                dim3(static_cast<unsigned>(threads)), shared_bytes, together, splits, stream,
                params);
}

// Launches a thread for each of `count` items.
template <class Params>
cudaError_t launch_flat(void (*kernel)(Params), int64_t count, int threads, cudaStream_t stream,
                        const Params& params) {
  if (count <= 0) return cudaSuccess;
  const int64_t blocks = divide_up<int64_t>(count, threads);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                0, Together::kNot, 1, stream, params);
}

template <class T, bool kHasBias>
cudaError_t launch_decode(const AttentionForwardParams& params, cudaStream_t stream) {
  const int index = tile_for(kAttentionForwardTiles, params);
  return with_regime(kAttentionForwardTiles, index, [&]<int kIndex>() {
    constexpr int kDim = kAttentionForwardTiles[kIndex].head_dim, kWarps = decode_warps(kDim);
    const Together together = params.splits == 1        ? Together::kNot
                              : params.parts == nullptr ? Together::kInClusters
                                                        : Together::kAll;
    return launch_tiles(attention_decode_kernel<T, kHasBias, kDim>, decode_row_tiles(params),
                        params.key_heads, params.batches, 32 * kWarps, DecodeLayout(kDim).bytes,
                        stream, params, params.splits, together);
  });
}

template <class T>
cudaError_t launch_wide(AttentionForwardParams params, cudaStream_t stream) {
  params.row_tiles = Divider(wide_row_tiles(params));
  return launch_tiles(params.bias.data != nullptr ? attention_wide_kernel<T, true>
                                                  : attention_wide_kernel<T, false>,
                      params.splits * params.row_tiles.divisor, params.key_heads, params.batches,
                      kWideThreads, WideLayout::kBytes, stream, params);
}

template <class T>
cudaError_t attention_forward_instance(const AttentionForwardParams& params, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (is_wide(params)) return launch_wide<T>(params, stream);
    if (takes_few_queries(params))
      return params.bias.data != nullptr ? launch_decode<T, true>(params, stream)
                                         : launch_decode<T, false>(params, stream);
  }
  const Device device = current_device();
  return with_bias_kind<T>(params, [&]<BiasKind kBias>() {
    const int index = tile_for(kAttentionForwardTiles, params, device);
    return with_tile<T, kAttentionForwardTiles, kBias>(index, [&]<int kIndex>() {
      using Memory = ForwardMemory<T, kBias, kIndex>;
      AttentionForwardParams launched = params;
      launched.bias_stages = bias_stages(Memory::kTile, kBias, device);
      launched.row_tiles = Divider(divide_up(params.queries, Memory::kQueries));
      return launch_tiles(is_plain(params) ? attention_forward_kernel<T, kBias, true, kIndex>
                                           : attention_forward_kernel<T, kBias, false, kIndex>,
                          params.splits * launched.row_tiles.divisor, params.heads, params.batches,
                          Memory::kThreads, Memory::kLayout.bytes(launched.bias_stages), stream,
                          launched);
    });
  });
}

template <class T>
cudaError_t attention_combine_instance(const AttentionForwardParams& params, cudaStream_t stream) {
  constexpr int kWarps = kCombineThreads / 32;
  const int64_t blocks = divide_up<int64_t>(params.rows(), kWarps / combine_warps(params.splits));
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int shared_bytes = kWarps * params.value_dim * static_cast<int>(sizeof(float));
  return launch(attention_combine_kernel<T>, dim3(static_cast<unsigned>(blocks)),
                dim3(kCombineThreads), shared_bytes,
                may_overlap(current_device()) ? Together::kOverlapping : Together::kNot, 1, stream,
                params);
}

// A kernel of a block of keys.
template <class Memory>
cudaError_t launch_of_keys(void (*kernel)(AttentionBackwardParams), int64_t tiles, int64_t heads,
                           int64_t batches, cudaStream_t stream,
                           const AttentionBackwardParams& params) {
  return launch_tiles(kernel, tiles, heads, batches, Memory::kThreads,
                      Memory::kLayout.bytes(params.stages), stream, params);
}

// The gradient of a table, where that is wanted, from sums along diagonals of tiles of kKeys keys.
template <int kKeys>
cudaError_t launch_diagonals(const AttentionBackwardParams& params, cudaStream_t stream) {
  if (params.bias_gradient_kind != BiasGradient::kDiagonals) return cudaSuccess;
  const int64_t entries =
      params.bias_batches() * params.bias_heads() * (params.queries + params.keys - 1);
  return launch_flat(attention_diagonals_kernel<kKeys>, entries * kDiagonalLanes, 256, stream,
                     params);
}

// What rows need is there; gradients of queries may be sums yet.
template <class T>
cudaError_t launch_backward(AttentionBackwardParams params, cudaStream_t stream) {
  const Device device = current_device();
  return with_bias_kind<T>(params, [&]<BiasKind kBias>() {
    const int index = tile_for(kAttentionBackwardTiles, params, device);
    return with_tile<T, kAttentionBackwardTiles, kBias>(index, [&]<int kIndex>() -> cudaError_t {
      using Memory = BackwardMemory<T, kBias, kIndex>;
      params.stages = query_stages(Memory::kTile, kBias, device);
      const int64_t key_tiles = divide_up(params.keys, Memory::kKeys);
      const auto launch_kernel = [&]<bool kHasTurns>() {
        return launch_of_keys<Memory>(
            is_plain(params) ? attention_backward_kernel<T, kBias, true, kHasTurns, kIndex>
                             : attention_backward_kernel<T, kBias, false, kHasTurns, kIndex>,
            key_tiles * Memory::kSlices, params.key_heads, params.batches, stream, params);
      };
      const bool has_turns = params.query_gradient_kind == QueryGradient::kInTurns ||
                             params.query_gradient_kind == QueryGradient::kWhole;
      if constexpr (Memory::kTile.has_turns()) {
        MEGASOFTMAX_RETURN_IF_ERROR(has_turns ? launch_kernel.template operator()<true>()
                                              : launch_kernel.template operator()<false>());
      } else {
        MEGASOFTMAX_RETURN_IF_ERROR(has_turns ? cudaErrorInvalidValue
                                              : launch_kernel.template operator()<false>());
      }
      if (params.query_gradient_kind == QueryGradient::kInOrder) {
        constexpr int kKeys = Memory::kTile.in_order_keys();
        MEGASOFTMAX_RETURN_IF_ERROR(launch_tiles(
            attention_query_gradient_in_order_kernel<T, kBias, Memory::kDim, kKeys>,
            divide_up(params.queries, kInOrderQueries), params.heads, params.batches,
            kInOrderThreads, InOrderLayout(Memory::kDim, kKeys, kBias, sizeof(T)).bytes, stream,
            params));
      }
      return kBias == BiasKind::kNone ? cudaSuccess
                                      : launch_diagonals<Memory::kKeys>(params, stream);
    });
  });
}

// The gradient of a bias in order, and of how many parts. What rows need is there.
template <class T>
cudaError_t launch_bias_gradient(AttentionBackwardParams params, cudaStream_t stream) {
  if (params.bias_entries() == 0) return cudaSuccess;
  return with_bias_kind<T>(params, [&]<BiasKind kBias>() {
    const BiasGradientPlan plan = bias_gradient_plan(params, current_device());
    return with_regime(kAttentionBiasGradientTiles, plan.tile, [&]<int kIndex>() -> cudaError_t {
      if constexpr (kBias == BiasKind::kNone ||
                    kAttentionBiasGradientTiles[kIndex].element_bytes != sizeof(T)) {
        return cudaErrorInvalidValue;
      } else {
        using Memory = BiasGradientMemory<T, kBias, kIndex>;
        params.stages = plan.stages;
        const int64_t blocks = params.bias_parts * params.bias_batches() * params.bias_heads() *
                               divide_up(params.queries, Memory::kQueries) *
                               divide_up(params.keys, Memory::kKeys);
        if (blocks > INT32_MAX) return cudaErrorInvalidValue;
        MEGASOFTMAX_RETURN_IF_ERROR(
            launch(params.dropout.seed != nullptr
                       ? attention_bias_gradient_kernel<T, kBias, true, kIndex>
                       : attention_bias_gradient_kernel<T, kBias, false, kIndex>,
                   dim3(static_cast<unsigned>(blocks)), dim3(Memory::kThreads),
                   Memory::kLayout.bytes(plan.stages), Together::kNot, 1, stream, params));
        if (params.bias_parts == 1) return cudaSuccess;
        return launch_flat(attention_bias_parts_kernel<T>,
                           divide_up<int64_t>(params.bias_entries(), 128) * kThreadsOfBiasParts,
                           kThreadsOfBiasParts, stream, params);
      }
    });
  });
}

// With as many lanes for a row as it has chunks.
template <class T>
cudaError_t launch_rows(const AttentionBackwardParams& params, cudaStream_t stream) {
  const auto launch_with = [&]<int kLanes>() {
    return launch_flat(attention_rows_kernel<T, kLanes>, params.rows() * kLanes, kThreadsOfRows,
                       stream, params);
  };
  if (params.value_dim <= 64) return launch_with.template operator()<8>();
  if constexpr (sizeof(T) == 2 || kMaxFloatHeadDim > 128) {
    if (params.value_dim > 128) return launch_with.template operator()<32>();
  }
  return launch_with.template operator()<16>();
}

template <class T>
cudaError_t attention_backward_instance(AttentionBackwardParams params, int hopper_tile,
                                        cudaStream_t stream) {
  if (params.bias_gradient_kind == BiasGradient::kInOrder) {
    AttentionBackwardParams others = params;  // without the gradient of the bias
    others.bias_gradient_kind = BiasGradient::kNone;
    others.bias_gradient = nullptr;
    MEGASOFTMAX_RETURN_IF_ERROR(attention_backward_instance<T>(others, hopper_tile, stream));
    return launch_bias_gradient<T>(params, stream);
  }
  // Each entry of a dense gradient is written, once, where no tile is left out. Hopper's kernels
  // clear what they do not add to in any order.
  const bool has_window = params.window_left >= 0 || params.window_right >= 0;
  const bool has_own_clearing =
      hopper_tile >= 0 && params.bias_gradient_kind != BiasGradient::kShared;
  const bool is_complete = !has_window && params.bias_gradient_kind == BiasGradient::kDense &&
                           params.note.words == nullptr;
  if (params.bias_gradient != nullptr && !is_complete && !has_own_clearing)
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaMemsetAsync(params.bias_gradient, 0, params.bias_gradient_bytes, stream));
  MEGASOFTMAX_RETURN_IF_ERROR(launch_rows<T>(params, stream));
  params.takes_all_queries = params.query_gradient_kind == QueryGradient::kWhole;
  params.takes_turns = params.turns != nullptr;
  if (params.turns != nullptr)
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaMemsetAsync(params.turns, 0, params.turn_count() * sizeof(uint32_t), stream));
  if (hopper_tile < 0) {
    MEGASOFTMAX_RETURN_IF_ERROR(launch_backward<T>(params, stream));
  } else if constexpr (sizeof(T) == 2) {
    MEGASOFTMAX_RETURN_IF_ERROR(attention_hopper_backward_instance<T>(params, hopper_tile, stream));
    constexpr int kKeys = kAttentionHopperBackwardTiles[0].keys();  // of all that take a table
    MEGASOFTMAX_RETURN_IF_ERROR(launch_diagonals<kKeys>(params, stream));
  }
  if (params.query_gradient_sum == nullptr) return cudaSuccess;
  return launch_flat(attention_query_gradient_kernel<T>, params.rows() * params.head_dim / 8, 256,
                     stream, params);
}

}  // namespace megasoftmax
