#pragma once
// The launchers, for each element type: each .cu beside this file instantiates one direction and
// type.

#include <cuda_runtime_api.h>

#include "../../common/vector.cuh"
#include "../plan.h"

namespace megasoftmax {

template <class T>
cudaError_t attention_forward_instance(const AttentionForwardParams& params, cudaStream_t stream);
// Adds up parts of rows, where keys are split.
template <class T>
cudaError_t attention_combine_instance(const AttentionForwardParams& params, cudaStream_t stream);
// Whether the code for 9.0a of a tile is there.
template <class T>
bool attention_hopper_forward_is_there(int index, HopperBias bias);
template <class T>
cudaError_t attention_hopper_forward_instance(const AttentionForwardParams& params, int index,
                                              cudaStream_t stream);
// With Hopper's kernels of `hopper_tile`, or with the portable ones where it is -1.
template <class T>
cudaError_t attention_backward_instance(AttentionBackwardParams params, int hopper_tile,
                                        cudaStream_t stream);
// As of the forward.
template <class T>
bool attention_hopper_backward_is_there(int index, HopperBias bias);
// Gradients of keys and values, and sums of those of queries.
template <class T>
cudaError_t attention_hopper_backward_instance(const AttentionBackwardParams& params, int index,
                                               cudaStream_t stream);

}  // namespace megasoftmax
