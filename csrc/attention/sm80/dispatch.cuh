#pragma once
// From a plan to one of the portable kernels.

#include "../../common/registration.h"
#include "../attention.h"
#include "../launches.cuh"
#include "backward.cuh"
#include "bias_gradient_in_order.cuh"
#include "decode.cuh"
#include "forward.cuh"
#include "plan.h"
#include "query_gradient.cuh"
#include "small.cuh"
#include "wide.cuh"

namespace megasoftmax {

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

template <class T, bool kHasBias>
cudaError_t launch_decode(const ForwardLaunch& launch, cudaStream_t stream) {
  const auto& [params, plan] = launch;
  return with_regime(kAttentionForwardTiles, plan.tile, [&]<int kIndex>() {
    constexpr int kDim = kAttentionForwardTiles[kIndex].head_dim, kWarps = decode_warps(kDim);
    const Together together = plan.splits.count == 1       ? Together::kNot
                              : plan.splits.take_workspace ? Together::kAll
                                                           : Together::kInClusters;
    return launch_tiles(attention_decode_kernel<T, kHasBias, kDim>, plan.row_tiles, plan.heads,
                        params.batches, 32 * kWarps, DecodeLayout(kDim).bytes, stream, params,
                        plan.splits.count, together);
  });
}

template <class T>
cudaError_t launch_wide(const ForwardLaunch& launch, cudaStream_t stream) {
  const auto& [params, plan] = launch;
  return launch_tiles(params.bias.data != nullptr ? attention_wide_kernel<T, true>
                                                  : attention_wide_kernel<T, false>,
                      plan.splits.count * plan.row_tiles, plan.heads, params.batches, kWideThreads,
                      WideLayout::kBytes, stream, params);
}

// Launches a kernel of small heads.
template <class Params, class Plan>
cudaError_t launch_small(void (*kernel)(Params), const Launch<Params, Plan>& launch,
                         cudaStream_t stream) {
  if (launch.plan.blocks > INT32_MAX) return cudaErrorInvalidValue;
  return megasoftmax::launch(kernel, dim3(static_cast<unsigned>(launch.plan.blocks)),
                             dim3(static_cast<unsigned>(launch.plan.threads)),
                             launch.plan.shared_bytes, Together::kNot, 1, stream, launch.params);
}

template <class T, BiasKind kBias>
cudaError_t launch_forward_with(const ForwardLaunch& launch, cudaStream_t stream) {
  const auto& [params, plan] = launch;
  return with_tile<T, kAttentionForwardTiles, kBias>(plan.tile, [&]<int kIndex>() {
    using Memory = ForwardMemory<T, kBias, kIndex>;
    return launch_tiles(is_unmasked(params)
                            ? attention_forward_kernel<T, kBias, may_be_unmasked(kBias), kIndex>
                            : attention_forward_kernel<T, kBias, false, kIndex>,
                        plan.splits.count * plan.row_tiles, plan.heads, params.batches,
                        Memory::kThreads, Memory::kLayout.bytes(plan.bias_stages), stream, params);
  });
}

// For the bias of the launch, which is one of kKinds.
template <class T, BiasKind... kKinds>
cudaError_t launch_tiles_forward(const ForwardLaunch& launch, cudaStream_t stream) {
  if (launch.plan.kernel != ForwardKernel::kTiles) return cudaErrorInvalidValue;
  return with_one_of<kKinds...>(bias_kind(launch.params), [&]<BiasKind kBias>() {
    return launch_forward_with<T, kBias>(launch, stream);
  });
}

template <class T>
cudaError_t launch_portable_forward(const ForwardLaunch& launch, cudaStream_t stream) {
  const auto& [params, plan] = launch;
  if constexpr (sizeof(T) == 2) {
    if (plan.kernel == ForwardKernel::kWide) return launch_wide<T>(launch, stream);
    if (plan.kernel == ForwardKernel::kSmall)
      return with_regime(kAttentionSmallTiles, plan.tile, [&]<int kIndex>() {
        return launch_small(attention_small_forward_kernel<T, kIndex>, launch, stream);
      });
    if (plan.kernel == ForwardKernel::kDecode)
      return params.bias.data != nullptr ? launch_decode<T, true>(launch, stream)
                                         : launch_decode<T, false>(launch, stream);
  }
  return launch_tiles_forward<T, BiasKind::kNone>(launch, stream);
}

template <class T, BiasKind kBias>
cudaError_t launch_backward_with(const BackwardLaunch& launch, cudaStream_t stream) {
  const auto& [params, plan] = launch;
  return with_tile<T, kAttentionBackwardTiles, kBias>(plan.tile, [&]<int kIndex>() -> cudaError_t {
    using Memory = BackwardMemory<T, kBias, kIndex>;
    const int64_t key_tiles = divide_up(params.keys, Memory::kKeys);
    const auto launch_kernel = [&]<bool kHasTurns>() {
      return launch_tiles(
          is_unmasked(params)
              ? attention_backward_kernel<T, kBias, may_be_unmasked(kBias), kHasTurns, kIndex>
              : attention_backward_kernel<T, kBias, false, kHasTurns, kIndex>,
          key_tiles * Memory::kSlices, params.key_heads, params.batches, Memory::kThreads,
          Memory::kLayout.bytes(plan.stages), stream, params);
    };
    const bool has_turns = plan.query_gradient == QueryGradient::kInTurns ||
                           plan.query_gradient == QueryGradient::kWhole;
    if constexpr (Memory::kTile.has_turns()) {
      MEGASOFTMAX_RETURN_IF_ERROR(has_turns ? launch_kernel.template operator()<true>()
                                            : launch_kernel.template operator()<false>());
    } else {
      MEGASOFTMAX_RETURN_IF_ERROR(has_turns ? cudaErrorInvalidValue
                                            : launch_kernel.template operator()<false>());
    }
    if (plan.query_gradient != QueryGradient::kInOrder) return cudaSuccess;
    constexpr int kKeys = Memory::kTile.in_order_keys();
    return launch_tiles(attention_query_gradient_in_order_kernel<T, kBias, Memory::kDim, kKeys>,
                        divide_up(params.queries, kInOrderQueries), params.heads, params.batches,
                        kInOrderThreads, InOrderLayout(Memory::kDim, kKeys, kBias, sizeof(T)).bytes,
                        stream, params);
  });
}

// For the bias of the launch, which is one of kKinds.
template <class T, BiasKind... kKinds>
cudaError_t launch_tiles_backward(const BackwardLaunch& launch, cudaStream_t stream) {
  return with_one_of<kKinds...>(bias_kind(launch.params), [&]<BiasKind kBias>() {
    return launch_backward_with<T, kBias>(launch, stream);
  });
}

template <class T>
cudaError_t launch_portable_backward(const BackwardLaunch& launch, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (launch.plan.kernel == BackwardKernel::kSmall)
      return with_regime(kAttentionSmallTiles, launch.plan.tile, [&]<int kIndex>() {
        return launch_small(attention_small_backward_kernel<T, kIndex>, launch, stream);
      });
  }
  return launch_tiles_backward<T, BiasKind::kNone>(launch, stream);
}

template <class T>
cudaError_t launch_bias_gradient(const BackwardLaunch& launch, cudaStream_t stream) {
  AttentionBackwardParams params = launch.params;
  const BiasGradientPlan& plan = launch.plan.in_order;
  using enum BiasKind;
  return with_one_of<kTile, kAny, kSoftcap>(bias_kind(params), [&]<BiasKind kBias>() {
    return with_regime(kAttentionBiasGradientTiles, plan.tile, [&]<int kIndex>() -> cudaError_t {
      if constexpr ((kBias == BiasKind::kTile && sizeof(T) != 2) ||
                    kAttentionBiasGradientTiles[kIndex].element_bytes != sizeof(T)) {
        return cudaErrorInvalidValue;
      } else {
        using Memory = BiasGradientMemory<T, kBias, kIndex>;
        params.stages = plan.stages;
        const int64_t blocks = params.bias_parts * params.bias_batches() * params.bias_heads() *
                               divide_up(params.queries, Memory::kQueries) *
                               divide_up(params.keys, Memory::kKeys);
        if (blocks > INT32_MAX) return cudaErrorInvalidValue;
        return megasoftmax::launch(
            params.dropout.seed != nullptr
                ? attention_bias_gradient_kernel<T, kBias, true, kIndex>
                : attention_bias_gradient_kernel<T, kBias, !may_be_unmasked(kBias), kIndex>,
            dim3(static_cast<unsigned>(blocks)), dim3(Memory::kThreads),
            Memory::kLayout.bytes(plan.stages), Together::kNot, 1, stream, params);
      }
    });
  });
}

}  // namespace megasoftmax
