#pragma once
// The launchers, for each element type: each .cu beside this file instantiates one direction and
// type, with dropout or without.

#include <cuda_runtime_api.h>

#include "../../common/vector.cuh"
#include "../plan.h"

namespace megasoftmax {

template <class T>
cudaError_t softmax_forward_instance(const ForwardParams& params, const Plan& plan,
                                     cudaStream_t stream);
template <class T>
cudaError_t softmax_backward_instance(const BackwardParams& params, const Plan& plan,
                                      cudaStream_t stream);
template <class T>
cudaError_t softmax_dropout_forward_instance(const ForwardParams& params, const Plan& plan,
                                             cudaStream_t stream);
template <class T>
cudaError_t softmax_dropout_backward_instance(const BackwardParams& params, const Plan& plan,
                                              cudaStream_t stream);

}  // namespace megasoftmax
