#pragma once
// Entry points of softmax + top-k. They launch on `stream`, allocate nothing and never synchronise.
// The type of the logits, `scores`, selects the kernels.

#include <cuda_runtime_api.h>

#include "plan.h"

namespace megasoftmax {

using TopkForwardLaunch = RowLaunch<TopkForwardParams, TopkPlan>;
using TopkBackwardLaunch = RowLaunch<TopkBackwardParams, TopkPlan>;

// Types of launchers, see common/kernels.h.
using TopkForwardLauncher = cudaError_t(const TopkForwardParams&, const TopkPlan&, cudaStream_t);
using TopkBackwardLauncher = cudaError_t(const TopkBackwardParams&, const TopkPlan&, cudaStream_t);

// Prepares `params` and plans the launch.
TopkForwardLaunch plan_softmax_topk_forward(TopkForwardParams params, cudaStream_t stream);
TopkBackwardLaunch plan_softmax_topk_backward(TopkBackwardParams params);

cudaError_t topk_forward(const TopkForwardLaunch& launch, cudaStream_t stream);
cudaError_t topk_backward(const TopkBackwardLaunch& launch, cudaStream_t stream);

// For tuning: the row of kTopkRegimes to take, -1 for the usual choice. Holds for the process.
void force_topk_regime(int regime);

}  // namespace megasoftmax
