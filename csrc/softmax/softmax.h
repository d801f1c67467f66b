#pragma once
// Entry points of the softmax family. They launch on `stream`, allocate nothing and never
// synchronise.

#include <cuda_runtime_api.h>

#include "params.h"

namespace megasoftmax {

// Bytes of params.workspace, which need not be set to anything; `params` is as for the launch.
int64_t softmax_forward_workspace(ForwardParams params, cudaStream_t stream);
int64_t softmax_backward_workspace(BackwardParams params, cudaStream_t stream);

// Sets what the launcher sets of a forward's params, and merges dimensions.
void prepare(ForwardParams& params);

// The type of `scores` selects the instance.
cudaError_t softmax_forward(ForwardParams params, cudaStream_t stream);

// The type of `probabilities` selects the instance.
cudaError_t softmax_backward(BackwardParams params, cudaStream_t stream);

// For tuning: rows of the tables to take where they serve a launch, -1 for the usual choice. Holds
// for the whole process.
void force_regimes(int forward, int backward);

// How to lay out BackwardParams::bias_gradient for a launch.
struct BiasGradientPlan {
  int64_t splits;    // parts to be summed
  bool accumulates;  // the buffer must be float32
};
BiasGradientPlan plan_bias_gradient(const Shape& shape, const Shape& bias_shape,
                                    DType probabilities_type, const Dropout& dropout);

}  // namespace megasoftmax
