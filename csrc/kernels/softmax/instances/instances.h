#pragma once
// One function per direction and element type; each .cu beside this file holds one of them.

#include <cuda_runtime_api.h>

#include "../plan.h"

namespace megasoftmax {

cudaError_t softmax_forward_float16(const ForwardParams& params, const Plan& plan,
                                    cudaStream_t stream);
cudaError_t softmax_forward_bfloat16(const ForwardParams& params, const Plan& plan,
                                     cudaStream_t stream);
cudaError_t softmax_forward_float32(const ForwardParams& params, const Plan& plan,
                                    cudaStream_t stream);
cudaError_t softmax_backward_float16(const BackwardParams& params, const Plan& plan,
                                     cudaStream_t stream);
cudaError_t softmax_backward_bfloat16(const BackwardParams& params, const Plan& plan,
                                      cudaStream_t stream);
cudaError_t softmax_backward_float32(const BackwardParams& params, const Plan& plan,
                                     cudaStream_t stream);

}  // namespace megasoftmax
