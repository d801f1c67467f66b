#pragma once
// The launchers, for each element type: each .cu beside this file instantiates one
// direction and type.

#include <cuda_runtime_api.h>

#include "../../common/vector.cuh"
#include "../plan.h"

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

}  // namespace megasoftmax
