#pragma once
// One function per direction and element type; each .cu beside this file holds one type's.

#include <cuda_runtime_api.h>

#include "../plan.h"

namespace megasoftmax {

cudaError_t topk_forward_float16(const TopkForwardParams& params, const TopkPlan& plan,
                                 cudaStream_t stream);
cudaError_t topk_forward_bfloat16(const TopkForwardParams& params, const TopkPlan& plan,
                                  cudaStream_t stream);
cudaError_t topk_forward_float32(const TopkForwardParams& params, const TopkPlan& plan,
                                 cudaStream_t stream);
cudaError_t topk_backward_float16(const TopkBackwardParams& params, const TopkPlan& plan,
                                  cudaStream_t stream);
cudaError_t topk_backward_bfloat16(const TopkBackwardParams& params, const TopkPlan& plan,
                                   cudaStream_t stream);
cudaError_t topk_backward_float32(const TopkBackwardParams& params, const TopkPlan& plan,
                                  cudaStream_t stream);

}  // namespace megasoftmax
