// megasoftmax::softmax_topk_forward and softmax_topk_backward for CUDA tensors. Schemas are defined
// in megasoftmax/ops/topk.py.

#include "../topk/topk.h"

#include <tuple>

#include "checks.h"
#include "library.h"

namespace megasoftmax {
namespace {

// Replaces tensors that kernels cannot read as they lie.
void set_logits(TopkParams& params, Tensor& logits, double scale, double softcap,
                std::optional<Tensor>& mask, const std::optional<Tensor>& bias) {
  check(logits.dim() >= 1, "logits must have at least one dimension");
  logits = with_aligned_storage(logits);
  params.shape = shape_of(logits);
  params.scores = strided(logits, logits, "logits");
  params.scores.type = dtype_of(logits.scalar_type(), "logits");
  if (mask) {
    params.mask = strided_mask(*mask, logits);
  }
  if (bias) {
    params.bias = strided(*bias, logits, "bias");
    params.bias.type = dtype_of(bias->scalar_type(), "bias");
  }
  static_cast<LogitOptions&>(params) = logit_options(scale, softcap);
}

void check_k(int64_t k, int64_t columns) {
  check(k >= 0 && k <= kMaxK && k <= columns, "k must be from 0 to ", kMaxK,
        " and at most the number of logits of a row");
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor logits, int64_t k, double scale, double softcap,
                                           std::optional<Tensor> mask, std::optional<Tensor> bias,
                                           bool renormalize, ScalarType dtype, bool candidates) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  TopkForwardParams params;
  set_logits(params, logits, scale, softcap, mask, bias);
  check_k(k, params.shape.columns);
  std::vector<int64_t> sizes = row_sizes(logits), statistics_sizes = sizes;
  sizes.push_back(k);
  statistics_sizes.insert(statistics_sizes.begin(), 3);
  Tensor values = new_tensor(sizes, dtype, logits);
  Tensor indices = new_tensor(sizes, ScalarType::Long, logits);
  Tensor statistics = new_tensor(statistics_sizes, ScalarType::Float, logits);

  params.k = static_cast<int>(k);
  params.renormalize = renormalize;
  params.candidates = candidates;
  params.probabilities = values.data_ptr();
  params.probabilities_type = result_dtype_of(dtype, params.scores.type);
  params.indices = static_cast<int64_t*>(indices.data_ptr());
  params.statistics = static_cast<float*>(statistics.data_ptr());
  const cudaStream_t stream = current_stream(logits);
  TopkForwardLaunch launch = plan_softmax_topk_forward(params, stream);
  const auto workspace = set_workspace(launch, logits);
  check_cuda(topk_forward(launch, stream), "softmax_topk_forward");
  return {std::move(values), std::move(indices), std::move(statistics)};
}

Tensor backward(Tensor gradient, Tensor probabilities, Tensor indices,
                std::optional<Tensor> lse_gradient, Tensor logits, Tensor statistics, double scale,
                double softcap, std::optional<Tensor> mask, std::optional<Tensor> bias,
                bool renormalize, bool of_bias, ScalarType dtype) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  TopkBackwardParams params;
  set_logits(params, logits, scale, softcap, mask, bias);
  check(probabilities.dim() == logits.dim(), "probabilities must be [..., k]");
  const int64_t k = probabilities.size(probabilities.dim() - 1);
  check(k >= 0 && k <= kMaxK, "probabilities: k must be from 0 to ", kMaxK);
  const int64_t rows = params.shape.rows();
  const auto contiguous = [&](const Tensor& tensor, int64_t count, ScalarType type,
                              const char* argument) {
    check(tensor.is_cuda() && tensor.get_device_index() == logits.get_device_index() &&
              tensor.numel() == count && tensor.scalar_type() == type,
          argument, " must have the shape and type that softmax_topk_forward gives it");
    return torch::stable::contiguous(tensor);
  };
  const ScalarType type = probabilities.scalar_type();
  const Tensor gradients = contiguous(gradient, rows * k, type, "gradient");
  const Tensor selected = contiguous(probabilities, rows * k, type, "probabilities");
  const Tensor columns = contiguous(indices, rows * k, ScalarType::Long, "indices");
  const Tensor row_statistics = contiguous(statistics, 3 * rows, ScalarType::Float, "statistics");
  Tensor lse_gradients;
  if (lse_gradient) {
    lse_gradients = contiguous(*lse_gradient, rows, ScalarType::Float, "lse_gradient");
    params.log_sum_exp_gradient = static_cast<const float*>(lse_gradients.data_ptr());
  }
  Tensor logits_gradient = new_tensor(sizes_of(logits), dtype, logits);

  params.k = static_cast<int>(k);
  params.renormalize = renormalize;
  params.probabilities = selected.data_ptr();
  params.probabilities_type = result_dtype_of(type, params.scores.type);
  params.indices = static_cast<int64_t*>(columns.data_ptr());
  params.statistics = static_cast<float*>(row_statistics.data_ptr());
  params.gradient = gradients.data_ptr();
  params.of_bias = of_bias;
  params.logits_gradient = logits_gradient.data_ptr();
  params.logits_gradient_type = result_dtype_of(dtype, params.scores.type);
  check_cuda(topk_backward(plan_softmax_topk_backward(params), current_stream(logits)),
             "softmax_topk_backward");
  return logits_gradient;
}

}  // namespace

void register_topk(Library& library) {
  implement(library, "softmax_topk_forward", TORCH_BOX(&forward));
  implement(library, "softmax_topk_backward", TORCH_BOX(&backward));
}

}  // namespace megasoftmax

// For ctypes: tuning forces regimes.
extern "C" __attribute__((visibility("default"))) void megasoftmax_force_topk_regime(int regime) {
  megasoftmax::force_topk_regime(regime);
}
