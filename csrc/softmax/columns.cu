// Selects the kernels of softmax over columns by element type.

#include "columns.cuh"

namespace megasoftmax {

cudaError_t softmax_columns_forward(const ColumnsForwardParams& params, cudaStream_t stream) {
  return with_dtype(params.scores_type, [&](auto tag) {
    return launch_columns_forward<decltype(tag)>(params, stream);
  });
}

cudaError_t softmax_columns_backward(const ColumnsBackwardParams& params, cudaStream_t stream) {
  return with_dtype(params.probabilities_type, [&](auto tag) {
    return launch_columns_backward<decltype(tag)>(params, stream);
  });
}

}  // namespace megasoftmax
