// Selects the instance by element type, and plans the bias gradient.

#include <algorithm>

#include "instances/instances.h"
#include "limits.h"
#include "softmax.h"

namespace megasoftmax {

namespace {
// Owners that keep a large GPU busy; fewer rows than that share a bias row's sum among several
// owners.
constexpr int64_t kEnoughOwners = 2048;
}  // namespace

cudaError_t softmax_forward(const ForwardParams& params, cudaStream_t stream) {
  switch (params.scores.type) {
    case DType::kFloat16:
      return softmax_forward_float16(params, stream);
    case DType::kBFloat16:
      return softmax_forward_bfloat16(params, stream);
    case DType::kFloat32:
      return softmax_forward_float32(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t softmax_backward(const BackwardParams& params, cudaStream_t stream) {
  switch (params.probabilities.type) {
    case DType::kFloat16:
      return softmax_backward_float16(params, stream);
    case DType::kBFloat16:
      return softmax_backward_bfloat16(params, stream);
    case DType::kFloat32:
      return softmax_backward_float32(params, stream);
  }
  return cudaErrorInvalidValue;
}

BiasGradientPlan plan_bias_gradient(const Shape& shape, const Shape& bias_shape,
                                    DType probabilities_type) {
  const int64_t owners = std::max<int64_t>(bias_shape.rows(), 1);
  const int64_t rows_per_owner = shape.rows() / owners;
  const int pack_elements = 16 / size_of(probabilities_type);
  const int64_t chunks = divide_up<int64_t>(shape.columns, pack_elements);
  BiasGradientPlan plan;
  plan.splits = std::clamp<int64_t>(divide_up(kEnoughOwners, owners), 1,
                                    std::max<int64_t>(rows_per_owner, 1));
  plan.accumulates =
      kBackwardRegimes[regime_for(kBackwardRegimes, chunks, kBiasGradient)].storage !=
      Storage::kRegisters;
  return plan;
}

}  // namespace megasoftmax
