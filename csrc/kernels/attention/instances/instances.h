#pragma once
// The launchers, for each element type: each .cu beside this file instantiates one direction and
// type.

#include <cuda_runtime_api.h>

#include "../../common/vector.cuh"
#include "../params.h"

namespace megasoftmax {

template <class T>
cudaError_t attention_forward_instance(const AttentionForwardParams& params, cudaStream_t stream);
template <class T>
cudaError_t attention_backward_instance(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace megasoftmax
