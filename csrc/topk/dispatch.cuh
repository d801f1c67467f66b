#pragma once
// From a plan to one kernel: policies from what is present, the kernel's shape from its regime.

#include "../common/launch.cuh"
#include "../common/registration.h"
#include "../softmax/dispatch.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "router.cuh"
#include "tile.cuh"
#include "topk.h"

namespace megasoftmax {

// Calls body.operator()<Mask, Bias>() with the policies of what is present.
template <class T, class Body>
cudaError_t with_policies(const TopkParams& params, Body&& body) {
  const auto with_bias = [&]<class Mask>() {
    if (params.bias.data == nullptr && params.are_linear())
      return body.template operator()<Mask, NoBias>();
    if (params.bias.type == DType::kFloat32)
      return body.template operator()<Mask, AddedBias<float>>();
    return params.bias.type == params.scores.type ? body.template operator()<Mask, AddedBias<T>>()
                                                  : cudaErrorInvalidValue;
  };
  return params.mask.data != nullptr ? with_bias.template operator()<BoolMask>()
                                     : with_bias.template operator()<NoMask>();
}

template <class T, int kLongest = 2, int kVectors = 1>
cudaError_t launch_topk_tiles(const TopkForwardParams& params, const TopkPlan& plan,
                              cudaStream_t stream) {
  constexpr int kStep = kLongest / kPackElements<T>;
  if (kLongest < tile_list_length(params.k)) {
    if constexpr (kLongest < kTileMaxK)
      return launch_topk_tiles<T, 2 * kLongest, kVectors>(params, plan, stream);
  } else if (kVectors < plan.tiles.lane_vectors) {
    if constexpr (kVectors < kMaxTileVectors)
      return launch_topk_tiles<T, kLongest, 2 * kVectors>(params, plan, stream);
  } else if constexpr (kVectors >= kStep) {
    return launch(topk_tile_kernel<T, kLongest, kVectors>, dim3(static_cast<unsigned>(plan.blocks)),
                  dim3(plan.threads), plan.shared_bytes, Together::kNot, 1, stream, params,
                  plan.tiles);
  }
  return cudaErrorInvalidValue;
}

// Rows that neither tiles nor routers take.
template <class T, class Mask, class Bias>
cudaError_t launch_topk_rows(const TopkForwardParams& params, const TopkPlan& plan,
                             cudaStream_t stream) {
  return with_regime(kTopkRegimes, plan.regime, [&]<int kIndex>() {
    constexpr TopkRegime kRegime = kTopkRegimes[kIndex];
    const TopkSchedule& schedule = plan.schedule;
    const Together together = schedule.is_cluster                   ? Together::kInClusters
                              : kRegime.blocks_per_row == kWholeGpu ? Together::kAll
                                                                    : Together::kNot;
    // Rows beyond the largest first dimension of a grid take its second one.
    const auto others = divide_up(params.rows, plan.blocks / schedule.blocks_per_row);
    const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(others));
    const auto launch_kernel = [&](auto kernel) {
      return launch(kernel, grid, dim3(plan.threads), plan.shared_bytes, together,
                    schedule.blocks_per_row, stream, params, schedule);
    };
    constexpr int kKernel = topk_kernel_of(kIndex);
    if constexpr (!Mask::kPresent && !Bias::kPresent) {
      if (Bias::kCaps || plan.has_unit_stride)
        return launch_kernel(topk_forward_kernel<T, Mask, Bias, kKernel, true>);
    }
    if constexpr (kRegime.takes_any_row() && !Bias::kCaps) {
      return launch_kernel(topk_forward_kernel<T, Mask, Bias, kKernel, false>);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

// Launches what plans of kTopkTile and kTopkRouter name.
template <class T>
cudaError_t launch_topk_tiles_forward(const TopkForwardParams& params, const TopkPlan& plan,
                                      cudaStream_t stream) {
  if (plan.regime == kTopkTile) return launch_topk_tiles<T>(params, plan, stream);
  const auto launch_kernel = [&]<ChosenBy kBy>() {
    const auto kernel = router_list_length(params.k) == 8 ? topk_router_kernel<T, 8, kBy>
                                                          : topk_router_kernel<T, kTileMaxK, kBy>;
    return launch(kernel, dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
                  plan.shared_bytes, Together::kNot, 1, stream, params, plan.tiles);
  };
  if (params.selection_bias == nullptr)
    return launch_kernel.template operator()<ChosenBy::kLogits>();
  return params.sigmoid ? launch_kernel.template operator()<ChosenBy::kSigmoidAndBias>()
                        : launch_kernel.template operator()<ChosenBy::kSoftmaxAndBias>();
}

template <class T>
cudaError_t launch_topk_forward(const TopkForwardParams& params, const TopkPlan& plan,
                                cudaStream_t stream) {
  return with_policies<T>(params, [&]<class Mask, class Bias>() {
    return launch_topk_rows<T, Mask, Bias>(params, plan, stream);
  });
}

template <class T>
cudaError_t launch_topk_capped_forward(const TopkForwardParams& params, const TopkPlan& plan,
                                       cudaStream_t stream) {
  return launch_topk_rows<T, NoMask, CapAlone>(params, plan, stream);
}

template <class T>
cudaError_t launch_topk_backward(const TopkBackwardParams& params, const TopkPlan& plan,
                                 cudaStream_t stream) {
  return with_policies<T>(params, [&]<class Mask, class Bias>() {
    return with_regime(kTopkBackwardRegimes, plan.regime, [&]<int kIndex>() {
      const auto launch_kernel = [&](auto kernel) {
        return launch(kernel, dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
                      plan.shared_bytes, Together::kNot, 1, stream, params, plan.schedule);
      };
      if constexpr (!Mask::kPresent && !Bias::kPresent) {
        if (params.is_contiguous)
          return launch_kernel(topk_backward_kernel<T, Mask, Bias, kIndex, true>);
      }
      return launch_kernel(topk_backward_kernel<T, Mask, Bias, kIndex, false>);
    });
  });
}

}  // namespace megasoftmax
