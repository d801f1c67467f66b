#pragma once
// The launchers of the kernels for each element type. Each .cu beside this file instantiates one
// function for one type.

#include <cuda_runtime_api.h>

#include "../../common/kernels.h"
#include "../../common/vector.cuh"
#include "../topk.h"

namespace megasoftmax {

template <class T>
cudaError_t topk_forward_instance(const TopkForwardParams& params, const TopkPlan& plan,
                                  cudaStream_t stream);
// Of rows that are capped alone, with unit stride.
template <class T>
cudaError_t topk_capped_forward_instance(const TopkForwardParams& params, const TopkPlan& plan,
                                         cudaStream_t stream);
template <class T>
cudaError_t topk_backward_instance(const TopkBackwardParams& params, const TopkPlan& plan,
                                   cudaStream_t stream);

template <class T>
cudaError_t launch_topk_forward(const TopkForwardLaunch& launch, cudaStream_t stream) {
  const bool is_capped = launch.params.are_capped_alone() && launch.plan.has_unit_stride;
  const auto instance = is_capped ? topk_capped_forward_instance<T> : topk_forward_instance<T>;
  return instance(launch.params, launch.plan, stream);
}

template <class T>
cudaError_t launch_topk_backward(const TopkBackwardLaunch& launch, cudaStream_t stream) {
  return topk_backward_instance<T>(launch.params, launch.plan, stream);
}

struct TopkLaunchers {
  static constexpr const char* kFamily = "topk";
  cudaError_t (*forward)(const TopkForwardLaunch&, cudaStream_t);
  cudaError_t (*backward)(const TopkBackwardLaunch&, cudaStream_t);
};
template <class T>
inline constexpr TopkLaunchers kTopkLaunchers = {launch_topk_forward<T>, launch_topk_backward<T>};

}  // namespace megasoftmax
