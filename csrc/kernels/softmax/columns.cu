// Selects the kernels of softmax over columns by element type.

#include "columns.cuh"

namespace megasoftmax {

cudaError_t softmax_columns_forward(const ColumnsForwardParams& params, cudaStream_t stream) {
  switch (params.scores_type) {
    case DType::kFloat16:
      return launch_columns_forward<__half>(params, stream);
    case DType::kBFloat16:
      return launch_columns_forward<__nv_bfloat16>(params, stream);
    case DType::kFloat32:
      return launch_columns_forward<float>(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t softmax_columns_backward(const ColumnsBackwardParams& params, cudaStream_t stream) {
  switch (params.probabilities_type) {
    case DType::kFloat16:
      return launch_columns_backward<__half>(params, stream);
    case DType::kBFloat16:
      return launch_columns_backward<__nv_bfloat16>(params, stream);
    case DType::kFloat32:
      return launch_columns_backward<float>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace megasoftmax
