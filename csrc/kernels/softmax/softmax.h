#pragma once
// Entry points of the softmax family. They launch on `stream`, allocate nothing and never
// synchronise.

#include <cuda_runtime_api.h>

#include "params.h"

namespace megasoftmax {

// The type of `scores` selects the instance.
cudaError_t softmax_forward(const ForwardParams& params, cudaStream_t stream);

// The type of `probabilities` selects the instance.
cudaError_t softmax_backward(const BackwardParams& params, cudaStream_t stream);

// How to lay out BackwardParams::bias_gradient for a launch.
struct BiasGradientPlan {
  int64_t splits;    // parts to be summed
  bool accumulates;  // the buffer must be float32
};
BiasGradientPlan plan_bias_gradient(const Shape& shape, const Shape& bias_shape,
                                    DType probabilities_type);

}  // namespace megasoftmax
