// megasoftmax::softmax_columns_forward and softmax_columns_backward for CUDA tensors: softmax over
// the middle of [outer, length, inner]. Schemas are defined in megasoftmax/ops/columns.py.

#include "../softmax/columns.h"

#include <tuple>

#include "checks.h"
#include "library.h"

namespace megasoftmax {
namespace {

ColumnsShape columns_shape_of(const Tensor& tensor, const char* argument) {
  check(tensor.is_cuda() && tensor.dim() == 3 && tensor.is_contiguous(), argument,
        " must be a contiguous [outer, length, inner] on a GPU");
  return {tensor.size(0), tensor.size(1), tensor.size(2)};
}

std::tuple<Tensor, Tensor> columns_forward(Tensor scores, double scale, ScalarType dtype,
                                           bool return_lse) {
  ColumnsForwardParams params;
  params.shape = columns_shape_of(scores, "scores");
  const auto [outer, length, inner] = params.shape;
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  Tensor probabilities = new_tensor({outer, length, inner}, dtype, scores);
  Tensor log_sum_exp =
      new_tensor(return_lse ? std::vector<int64_t>{outer, inner} : std::vector<int64_t>{0},
                 ScalarType::Float, scores);

  params.scores = scores.data_ptr();
  params.scores_type = dtype_of(scores.scalar_type(), "scores");
  params.scale = static_cast<float>(scale);
  params.probabilities = probabilities.data_ptr();
  params.probabilities_type = result_dtype_of(dtype, params.scores_type);
  if (return_lse) params.log_sum_exp = static_cast<float*>(log_sum_exp.data_ptr());
  check_cuda(softmax_columns_forward(params, current_stream(scores)), "softmax_columns_forward");
  return {std::move(probabilities), std::move(log_sum_exp)};
}

Tensor columns_backward(Tensor gradient, Tensor probabilities, std::optional<Tensor> lse_gradient,
                        double scale, ScalarType dtype) {
  ColumnsBackwardParams params;
  params.shape = columns_shape_of(probabilities, "probabilities");
  const auto [outer, length, inner] = params.shape;
  const auto is_beside = [&](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == probabilities.get_device_index();
  };
  const ColumnsShape shape = columns_shape_of(gradient, "gradient");
  check(gradient.scalar_type() == probabilities.scalar_type() && is_beside(gradient) &&
            shape.outer == outer && shape.length == length && shape.inner == inner,
        "gradient must have the type, device and shape of probabilities");
  const torch::stable::accelerator::DeviceGuard guard(probabilities.get_device_index());
  Tensor scores_gradient = new_tensor({outer, length, inner}, dtype, probabilities);

  params.gradient = gradient.data_ptr();
  params.probabilities = probabilities.data_ptr();
  params.probabilities_type = dtype_of(probabilities.scalar_type(), "probabilities");
  Tensor lse_gradient_columns;
  if (lse_gradient) {
    check(lse_gradient->scalar_type() == ScalarType::Float && is_beside(*lse_gradient) &&
              lse_gradient->numel() == outer * inner,
          "the gradient of lse must be float32 [outer, inner], on the same device");
    lse_gradient_columns = torch::stable::contiguous(*lse_gradient);
    params.log_sum_exp_gradient = static_cast<const float*>(lse_gradient_columns.data_ptr());
  }
  params.scale = static_cast<float>(scale);
  params.scores_gradient = scores_gradient.data_ptr();
  params.scores_gradient_type = result_dtype_of(dtype, params.probabilities_type);
  check_cuda(softmax_columns_backward(params, current_stream(probabilities)),
             "softmax_columns_backward");
  return scores_gradient;
}

}  // namespace

void register_columns(Library& library) {
  implement(library, "softmax_columns_forward", TORCH_BOX(&columns_forward));
  implement(library, "softmax_columns_backward", TORCH_BOX(&columns_backward));
}

}  // namespace megasoftmax
