#pragma once
// The launchers, for each element type: each .cu beside this file instantiates one direction and
// type.

#include <cuda_runtime_api.h>

#include "../../common/vector.cuh"
#include "../backends.h"

namespace megasoftmax {

// All launches of a pass.
template <class T>
cudaError_t attention_forward_instance(const ForwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t attention_backward_instance(const BackwardLaunch& launch, cudaStream_t stream);

// Those of a backend: backward, gradients of keys and values, and sums of those of queries. What
// rows need is there.
template <class T>
cudaError_t launch_forward(Sm80, const ForwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_backward(Sm80, const BackwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_forward(Sm90, const ForwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_heads(Sm90, const ForwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_backward(Sm90, const BackwardLaunch& launch, cudaStream_t stream);
// dB in order, or its parts.
template <class T>
cudaError_t launch_bias_gradient(Sm90, const BackwardLaunch& launch, cudaStream_t stream);

// Whether the code of a backend was compiled for this GPU.
template <class T>
bool has_code(Sm90);

}  // namespace megasoftmax
