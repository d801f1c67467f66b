#pragma once
// Entry points of softmax + top-k. They launch on `stream`, allocate nothing and never synchronise.
// The type of the logits, `scores`, selects the instance.

#include <cuda_runtime_api.h>

#include "params.h"

namespace megasoftmax {

// Bytes of params.workspace, which need not be set to anything; `params` is as for the launch.
int64_t topk_forward_workspace(TopkForwardParams params, cudaStream_t stream);

cudaError_t topk_forward(TopkForwardParams params, cudaStream_t stream);
cudaError_t topk_backward(TopkBackwardParams params, cudaStream_t stream);

// For tuning: the row of kTopkRegimes to take, -1 for the usual choice. Holds for the process.
void force_topk_regime(int regime);

}  // namespace megasoftmax
