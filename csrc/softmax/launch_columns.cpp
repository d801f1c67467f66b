// Finds the launcher of softmax over columns.

#include "../common/kernels.h"
#include "columns.h"

namespace megasoftmax {
namespace {
Launchers<ColumnsForwardLauncher> forward("columns_forward");
Launchers<ColumnsBackwardLauncher> backward("columns_backward");

bool is_empty(const ColumnsShape& shape) { return shape.outer == 0 || shape.inner == 0; }
}  // namespace

cudaError_t softmax_columns_forward(const ColumnsForwardParams& params, cudaStream_t stream) {
  return is_empty(params.shape) ? cudaSuccess : forward.of(params.scores_type)(params, stream);
}

cudaError_t softmax_columns_backward(const ColumnsBackwardParams& params, cudaStream_t stream) {
  return is_empty(params.shape) ? cudaSuccess
                                : backward.of(params.probabilities_type)(params, stream);
}

}  // namespace megasoftmax
