#pragma once
// The launchers of the kernels for each element type. Each .cu beside this file instantiates one
// function for one type, so that no file takes much longer to compile than the others.

#include <cuda_runtime_api.h>

#include "../../common/kernels.h"
#include "../../common/vector.cuh"
#include "../softmax.h"

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

template <class T>
cudaError_t launch_softmax_forward(const SoftmaxForwardLaunch& launch, cudaStream_t stream) {
  const ForwardParams& params = launch.params;
  const bool is_biased = params.takes_bias_instance(), is_masked = params.mask.data != nullptr;
  const auto instance = params.are_capped_alone()   ? softmax_capped_forward_instance<T>
                        : params.dropout.is_given() ? softmax_dropout_forward_instance<T>
                        : is_biased && is_masked    ? softmax_masked_biased_forward_instance<T>
                        : is_biased                 ? softmax_biased_forward_instance<T>
                        : is_masked                 ? softmax_masked_forward_instance<T>
                                                    : softmax_forward_instance<T>;
  return instance(params, launch.plan, stream);
}

template <class T>
cudaError_t launch_softmax_backward(const SoftmaxBackwardLaunch& launch, cudaStream_t stream) {
  const BackwardParams& params = launch.params;
  const auto instance = !params.has_scores()           ? softmax_backward_instance<T>
                        : params.are_capped_alone()    ? softmax_capped_backward_instance<T>
                        : params.takes_bias_instance() ? softmax_biased_dropout_backward_instance<T>
                                                       : softmax_dropout_backward_instance<T>;
  return instance(params, launch.plan, stream);
}

struct SoftmaxLaunchers {
  static constexpr const char* kFamily = "softmax";
  cudaError_t (*forward)(const SoftmaxForwardLaunch&, cudaStream_t);
  cudaError_t (*backward)(const SoftmaxBackwardLaunch&, cudaStream_t);
};
template <class T>
inline constexpr SoftmaxLaunchers kSoftmaxLaunchers = {launch_softmax_forward<T>,
                                                       launch_softmax_backward<T>};

}  // namespace megasoftmax
