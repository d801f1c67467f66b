// Selects the instance by element type.

#include "attention.h"
#include "instances/instances.h"
#include "plan.h"

namespace megasoftmax {

int attention_forward_splits(const AttentionParams& params) {
  thread_local int device = -1, multiprocessors = 0;
  int current = 0;
  cudaGetDevice(&current);
  if (current != device) {
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, current);
    device = current;
  }
  return forward_splits(params, multiprocessors);
}

cudaError_t attention_forward(AttentionForwardParams params, cudaStream_t stream) {
  if (params.rows() == 0) return cudaSuccess;
  if (!is_valid(params)) return cudaErrorInvalidValue;
  return params.query.type == DType::kFloat16
             ? attention_forward_instance<__half>(params, stream)
             : attention_forward_instance<__nv_bfloat16>(params, stream);
}

int attention_backward_keys(const AttentionParams& params) {
  return kAttentionBackwardTiles[tile_for(kAttentionBackwardTiles, params)].keys();
}

cudaError_t attention_backward(AttentionBackwardParams params, cudaStream_t stream) {
  if (params.batches == 0 || params.heads == 0) return cudaSuccess;
  if (!is_valid(params)) return cudaErrorInvalidValue;
  return params.query.type == DType::kFloat16
             ? attention_backward_instance<__half>(params, stream)
             : attention_backward_instance<__nv_bfloat16>(params, stream);
}

}  // namespace megasoftmax
