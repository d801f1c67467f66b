// megasoftmax::softmax_topk_forward and softmax_topk_backward for CUDA tensors. Schemas are defined
// in megasoftmax/ops/topk.py.

#include "../topk/topk.h"

#include <tuple>

#include "checks.h"
#include "library.h"

namespace megasoftmax {
namespace {

// A number for each row, which broadcasts to the logits without their last dimension. A tensor with
// other strides is replaced by a copy.
template <class Number>
OfRows<Number> of_rows(std::optional<Tensor>& tensor, const Tensor& logits, const char* argument) {
  if (!tensor) return {};
  const ScalarType type = std::is_same_v<Number, float> ? ScalarType::Float : ScalarType::Int;
  check(tensor->scalar_type() == type, argument, " must be ",
        type == ScalarType::Float ? "float32" : "int32");
  const std::vector<int64_t> sizes = row_sizes(logits);
  const auto missing = static_cast<int64_t>(sizes.size()) - tensor->dim();
  bool broadcasts =
      missing >= 0 && tensor->is_cuda() && tensor->get_device_index() == logits.get_device_index();
  for (int64_t i = 0; broadcasts && i < tensor->dim(); ++i)
    broadcasts = tensor->size(i) == 1 || tensor->size(i) == sizes[missing + i];
  check(broadcasts, argument, " must broadcast to the rows of logits, on their device");
  int64_t rows = 1;
  for (const int64_t size : sizes) rows *= size;
  int64_t stride = tensor->numel() == 1 ? 0 : 1;
  if (stride == 1 && tensor->numel() == rows && tensor->dim() == 1) {
    stride = tensor->stride(0);
  } else if (stride == 1 && (tensor->numel() != rows || !tensor->is_contiguous())) {
    Tensor copy = new_tensor(sizes, type, logits);
    tensor = torch::stable::copy_(copy, *tensor);
  }
  return {static_cast<const Number*>(tensor->data_ptr()), stride};
}

// A limit as ops take it: a number of all rows, and a tensor in its place.
template <class Number>
using Limit = std::pair<Number, std::optional<Tensor>&>;

void set_limits(TopkForwardParams& params, const Tensor& logits, Limit<int64_t> top_k,
                Limit<double> top_p, Limit<double> min_p) {
  TopkLimits& limits = params.limits;
  limits.top_k = static_cast<int>(std::min<int64_t>(top_k.first, INT32_MAX));
  limits.top_p = static_cast<float>(top_p.first);
  limits.min_p = static_cast<float>(min_p.first);
  limits.row_top_k = of_rows<int>(top_k.second, logits, "row_top_k");
  limits.row_top_p = of_rows<float>(top_p.second, logits, "row_top_p");
  limits.row_min_p = of_rows<float>(min_p.second, logits, "row_min_p");
  limits.are_given = top_k.first > 0 || top_p.first < 1 || min_p.first > 0 || top_k.second ||
                     top_p.second || min_p.second;
}

// Replaces tensors that kernels cannot read as they lie.
void set_logits(TopkParams& params, Tensor& logits, double scale, double softcap,
                std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
                std::optional<Tensor>& row_scale) {
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
  check(!row_scale || (!bias && params.are_linear()),
        "row_scale must be None with a bias or a softcap");
  if (row_scale) params.scale = 1;
  params.row_scale = of_rows<float>(row_scale, logits, "row_scale");
}

// The tensor, or a copy, contiguous from a multiple of 16 bytes on.
Tensor contiguous_at_vectors(const Tensor& tensor) {
  const Tensor found = torch::stable::contiguous(tensor);
  return reinterpret_cast<uintptr_t>(found.data_ptr()) % 16 == 0 ? found
                                                                 : torch::stable::clone(found);
}

void check_k(int64_t k, int64_t columns) {
  check(k >= 0 && k <= kMaxK && k <= columns, "k must be from 0 to ", kMaxK,
        " and at most the number of logits of a row");
}

// Makes the results, and launches.
std::tuple<Tensor, Tensor, Tensor> launch_forward(TopkForwardParams params, const Tensor& logits,
                                                  int64_t k, ScalarType dtype) {
  check_k(k, params.shape.columns);
  std::vector<int64_t> sizes = row_sizes(logits), statistics_sizes = sizes;
  sizes.push_back(k);
  statistics_sizes.insert(statistics_sizes.begin(), 3);
  Tensor values = new_tensor(sizes, dtype, logits);
  Tensor indices = new_tensor(sizes, ScalarType::Long, logits);
  Tensor statistics = new_tensor(statistics_sizes, ScalarType::Float, logits);

  params.k = static_cast<int>(k);
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

std::tuple<Tensor, Tensor, Tensor> forward(Tensor logits, int64_t k, double scale, double softcap,
                                           std::optional<Tensor> mask, std::optional<Tensor> bias,
                                           bool renormalize, ScalarType dtype, bool candidates,
                                           std::optional<Tensor> row_scale, int64_t top_k,
                                           std::optional<Tensor> row_top_k, double top_p,
                                           std::optional<Tensor> row_top_p, double min_p,
                                           std::optional<Tensor> row_min_p, bool sigmoid,
                                           std::optional<Tensor> selection_bias) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  TopkForwardParams params;
  params.sigmoid = sigmoid;
  const bool is_of_router = sigmoid || selection_bias;
  if (is_of_router) logits = contiguous_at_vectors(logits);
  set_logits(params, logits, scale, softcap, mask, bias, row_scale);
  if (is_of_router) {
    const int64_t columns = params.shape.columns;
    check(k <= kTileMaxK && columns <= kRouterMaxColumns &&
              columns * size_of(params.scores.type) % 16 == 0 && !mask && !bias && softcap == 0 &&
              !row_scale,
          "routers take at most ", kTileMaxK, " of ", kRouterMaxColumns,
          " columns, in whole 16 bytes, without a mask, a bias, a softcap and a scale of rows");
    if (selection_bias) {
      check(selection_bias->numel() == columns && selection_bias->is_cuda() &&
                selection_bias->get_device_index() == logits.get_device_index() &&
                selection_bias->scalar_type() == ScalarType::Float,
            "selection_bias must be float32, one for each column");
      selection_bias = contiguous_at_vectors(*selection_bias);
      params.selection_bias = selection_bias->data_ptr();
    }
  }
  set_limits(params, logits, {top_k, row_top_k}, {top_p, row_top_p}, {min_p, row_min_p});
  params.renormalize = renormalize;
  params.candidates = candidates;
  return launch_forward(params, logits, k, dtype);
}

std::tuple<Tensor, Tensor, Tensor> sample(Tensor logits, int64_t k, double scale,
                                          std::optional<Tensor> row_scale,
                                          std::optional<Tensor> mask, int64_t top_k,
                                          std::optional<Tensor> row_top_k, double top_p,
                                          std::optional<Tensor> row_top_p, double min_p,
                                          std::optional<Tensor> row_min_p, Tensor seed) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  TopkForwardParams params;
  set_logits(params, logits, scale, 0, mask, {}, row_scale);
  set_limits(params, logits, {top_k, row_top_k}, {top_p, row_top_p}, {min_p, row_min_p});
  params.renormalize = true;
  check(k >= 1, "k must be at least 1");
  params.limits.are_given = true;
  params.seed = dropout_of(0, seed, logits).seed;
  Tensor drawn = new_tensor(row_sizes(logits), ScalarType::Long, logits);
  params.drawn = static_cast<int64_t*>(drawn.data_ptr());
  auto [values, indices, statistics] = launch_forward(params, logits, k, ScalarType::Float);
  return {std::move(drawn), std::move(values), std::move(indices)};
}

Tensor backward(Tensor gradient, Tensor probabilities, Tensor indices,
                std::optional<Tensor> lse_gradient, Tensor logits, Tensor statistics, double scale,
                double softcap, std::optional<Tensor> mask, std::optional<Tensor> bias,
                bool renormalize, bool of_bias, ScalarType dtype, std::optional<Tensor> row_scale,
                bool sigmoid) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  TopkBackwardParams params;
  params.sigmoid = sigmoid;
  set_logits(params, logits, scale, softcap, mask, bias, row_scale);
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
  if (lse_gradient && !sigmoid) {  // whose statistics are constants
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
  library.impl("softmax_topk_sample", TORCH_BOX(&sample));
}

}  // namespace megasoftmax

// For ctypes: tuning forces regimes.
extern "C" __attribute__((visibility("default"))) void megasoftmax_force_topk_regime(int regime) {
  megasoftmax::force_topk_regime(regime);
}
