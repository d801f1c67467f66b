#pragma once
// The launchers, for each element type: each .cu beside this file instantiates one of them for one
// type, so that no file takes much longer to compile than the others.

#include <cuda_runtime_api.h>

#include "../../common/vector.cuh"
#include "../plan.h"

namespace megasoftmax {

template <class T>
cudaError_t softmax_forward_instance(const ForwardParams& params, const Plan& plan,
                                     cudaStream_t stream);
template <class T>
cudaError_t softmax_masked_forward_instance(const ForwardParams& params, const Plan& plan,
                                            cudaStream_t stream);
template <class T>
cudaError_t softmax_biased_forward_instance(const ForwardParams& params, const Plan& plan,
                                            cudaStream_t stream);
template <class T>
cudaError_t softmax_masked_biased_forward_instance(const ForwardParams& params, const Plan& plan,
                                                   cudaStream_t stream);
template <class T>
cudaError_t softmax_backward_instance(const BackwardParams& params, const Plan& plan,
                                      cudaStream_t stream);
template <class T>
cudaError_t softmax_capped_forward_instance(const ForwardParams& params, const Plan& plan,
                                            cudaStream_t stream);
template <class T>
cudaError_t softmax_capped_backward_instance(const BackwardParams& params, const Plan& plan,
                                             cudaStream_t stream);
template <class T>
cudaError_t softmax_dropout_forward_instance(const ForwardParams& params, const Plan& plan,
                                             cudaStream_t stream);
template <class T>
cudaError_t softmax_dropout_backward_instance(const BackwardParams& params, const Plan& plan,
                                              cudaStream_t stream);
template <class T>
cudaError_t softmax_biased_dropout_backward_instance(const BackwardParams& params, const Plan& plan,
                                                     cudaStream_t stream);

}  // namespace megasoftmax
