#pragma once
// One function per direction and element type; each .cu beside this file holds one of them.

#include <cuda_runtime_api.h>

#include "../params.h"

namespace megasoftmax {

cudaError_t attention_forward_float16(const AttentionForwardParams& params, cudaStream_t stream);
cudaError_t attention_forward_bfloat16(const AttentionForwardParams& params, cudaStream_t stream);
cudaError_t attention_backward_float16(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t attention_backward_bfloat16(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace megasoftmax
