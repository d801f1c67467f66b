#pragma once
// Entry points of the softmax family. They launch on `stream`, allocate nothing and never
// synchronise.

#include <cuda_runtime_api.h>

#include "plan.h"

namespace megasoftmax {

using SoftmaxForwardLaunch = RowLaunch<ForwardParams, Plan>;
using SoftmaxBackwardLaunch = RowLaunch<BackwardParams, Plan>;

// Types of launchers, see common/kernels.h.
using SoftmaxForwardLauncher = cudaError_t(const ForwardParams&, const Plan&, cudaStream_t);
using SoftmaxBackwardLauncher = cudaError_t(const BackwardParams&, const Plan&, cudaStream_t);

// Prepares `params` and plans the launch.
SoftmaxForwardLaunch plan_softmax_forward(ForwardParams params, cudaStream_t stream);
SoftmaxBackwardLaunch plan_softmax_backward(BackwardParams params, cudaStream_t stream);

// The type of the scores selects the kernels, or that of the probabilities.
cudaError_t softmax_forward(const SoftmaxForwardLaunch& launch, cudaStream_t stream);
cudaError_t softmax_backward(const SoftmaxBackwardLaunch& launch, cudaStream_t stream);

// For tuning: the regimes to take where they serve a launch, -1 for the usual choice. Holds for the
// whole process.
void force_regimes(int forward, int backward);

}  // namespace megasoftmax
