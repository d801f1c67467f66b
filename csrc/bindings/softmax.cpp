// megasoftmax::softmax_forward, softmax_backward and softmax_dropout_backward for CUDA tensors.
// Schemas are defined in megasoftmax/ops/softmax.py.

#include "../softmax/softmax.h"

#include <tuple>

#include "checks.h"
#include "library.h"

namespace megasoftmax {
namespace {

// Whether entries of a row lie apart: kernels would fetch 32 bytes for each of them, and again for
// all that share it.
bool has_scattered_rows(const Tensor& bias) {
  const int64_t last = bias.dim() - 1;
  return last >= 0 && bias.size(last) > 1 && bias.stride(last) > 1;
}

// Sets what forward and backward share.
template <class Params>
void set_options(Params& params, const LogitOptions& logits, const Window& window,
                 const VisibleRanges& visible) {
  static_cast<LogitOptions&>(params) = logits;
  params.window = window;
  params.visible = visible;
}

// The probabilities of a call whose other arguments `params` has.
Tensor probabilities_of(const Tensor& scores, std::optional<Tensor> mask, ScalarType dtype,
                        ForwardParams& params) {
  Tensor probabilities = new_tensor(sizes_of(scores), dtype, scores);
  params.shape = shape_of(scores);
  params.scores = strided(scores, scores, "scores");
  params.scores.type = dtype_of(scores.scalar_type(), "scores");
  if (mask) params.mask = strided_mask(*mask, scores);
  params.probabilities = probabilities.data_ptr();
  params.probabilities_type = result_dtype_of(dtype, params.scores.type);
  const cudaStream_t stream = current_stream(scores);
  SoftmaxForwardLaunch launch = plan_softmax_forward(params, stream);
  const auto workspace = set_workspace(launch, scores);
  check_cuda(softmax_forward(launch, stream), "softmax_forward");
  return probabilities;
}

std::tuple<Tensor, Tensor> forward(Tensor scores, double scale, double softcap,
                                   std::optional<Tensor> mask, std::optional<Tensor> bias,
                                   bool causal, int64_t window_left, int64_t window_right,
                                   std::optional<Tensor> first, std::optional<Tensor> end,
                                   std::optional<Tensor> sink, std::optional<double> sink_value,
                                   ScalarType dtype, bool return_lse, double dropout,
                                   std::optional<Tensor> seed) {
  check(scores.dim() >= 1, "scores must have at least one dimension");
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  scores = with_aligned_storage(scores);
  Tensor log_sum_exp = new_tensor(return_lse ? row_sizes(scores) : std::vector<int64_t>{0},
                                  ScalarType::Float, scores);
  ForwardParams params;
  if (bias && has_scattered_rows(*bias)) bias = with_contiguous_rows(*bias, 1);
  if (bias) {
    params.bias = strided(*bias, scores, "bias");
    params.bias.type = dtype_of(bias->scalar_type(), "bias");
  }
  set_options(params, logit_options(scale, softcap, sink, sink_value, scores),
              window_of(causal, window_left, window_right), visible_of(first, end, scores));
  if (dropout > 0) params.dropout = dropout_of(dropout, seed, scores);
  if (return_lse) params.log_sum_exp = static_cast<float*>(log_sum_exp.data_ptr());
  Tensor probabilities = probabilities_of(scores, std::move(mask), dtype, params);
  return {std::move(probabilities), std::move(log_sum_exp)};
}

Tensor forward_alone(Tensor scores, double scale, std::optional<Tensor> mask, bool causal,
                     ScalarType dtype) {
  check(scores.dim() >= 1, "scores must have at least one dimension");
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  ForwardParams params;
  set_options(params, logit_options(scale, 0), window_of(causal, -1, -1), {});
  return probabilities_of(with_aligned_storage(scores), std::move(mask), dtype, params);
}

Tensor in_type(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

// Sums the parts of a bias gradient and gives it the bias's type.
Tensor sum_of_parts(const Tensor& parts, int64_t splits, const Tensor& bias) {
  const std::array<int64_t, 1> first{0};
  const Tensor sum =
      splits == 1
          ? torch::stable::select(parts, 0, 0)
          : torch::stable::sum(parts, torch::headeronly::IntHeaderOnlyArrayRef(first.data(), 1));
  return in_type(sum, bias.scalar_type());
}

// The gradients of a call whose other arguments `params` has. If it `has_scores`, `probabilities`
// are these, and kernels compute the probabilities again. Else only shape and type of the bias
// matter.
std::tuple<Tensor, Tensor, Tensor> gradients_of(
    Tensor gradient, Tensor probabilities, const std::optional<Tensor>& lse_gradient,
    const std::optional<Tensor>& lse, std::optional<Tensor> mask, const std::optional<Tensor>& bias,
    ScalarType dtype, bool bias_gradient, bool sink_gradient, BackwardParams& params) {
  gradient = with_aligned_storage(gradient);
  probabilities = with_aligned_storage(probabilities);
  Tensor scores_gradient = new_tensor(sizes_of(probabilities), dtype, probabilities);
  Tensor sink_rows = new_tensor(sink_gradient ? row_sizes(probabilities) : std::vector<int64_t>{0},
                                ScalarType::Float, probabilities);

  params.shape = shape_of(probabilities);
  params.gradient = strided(gradient, probabilities, "gradient");
  params.probabilities = strided(probabilities, probabilities, "probabilities");
  params.gradient.type = params.probabilities.type =
      dtype_of(probabilities.scalar_type(), "probabilities");
  const auto float_rows = [&](const Tensor& tensor) {
    check(tensor.scalar_type() == ScalarType::Float, "lse and its gradient must be float32");
    check(tensor.is_cuda() && tensor.get_device_index() == probabilities.get_device_index() &&
              tensor.numel() == params.shape.rows(),
          "lse and its gradient must hold one number per row, on the same device");
    return torch::stable::contiguous(tensor);
  };
  Tensor lse_gradient_rows, lse_rows;
  if (lse_gradient) {
    lse_gradient_rows = float_rows(*lse_gradient);
    params.log_sum_exp_gradient = static_cast<const float*>(lse_gradient_rows.data_ptr());
  }
  if (sink_gradient || params.has_scores()) {
    check(lse.has_value(), "the sink's gradient needs lse");
    lse_rows = float_rows(*lse);
    params.log_sum_exp = static_cast<const float*>(lse_rows.data_ptr());
  }
  if (sink_gradient) params.sink_gradient = static_cast<float*>(sink_rows.data_ptr());
  if (mask) params.mask = strided_mask(*mask, probabilities);
  Tensor read_bias;
  if (params.has_scores() && bias) {
    const bool is_wide = params.probabilities.type == DType::kFloat32;
    read_bias = is_wide ? in_type(*bias, ScalarType::Float) : *bias;
    if (has_scattered_rows(read_bias)) read_bias = with_contiguous_rows(read_bias, 1);
    params.bias = strided(read_bias, probabilities, "bias");
    params.bias.type = dtype_of(read_bias.scalar_type(), "bias");
  }
  params.scores_gradient = scores_gradient.data_ptr();
  params.scores_gradient_type = result_dtype_of(dtype, params.probabilities.type);

  if (bias_gradient) {
    check(bias.has_value(), "bias_gradient without a bias");
    const int64_t columns = params.shape.columns;
    check(bias->dim() >= 1, "bias must have at least one dimension");
    strided(*bias, probabilities, "bias");  // its checks
    check(bias->size(bias->dim() - 1) == columns,
          "the gradient of a bias that is broadcast over keys is not fused");
    const RowCounts rows = row_counts(*bias);
    params.has_bias_gradient = true;
    params.bias_shape = {rows[0], rows[1], rows[2], columns};
    check((rows[0] == 1 || rows[0] == params.shape.batches),
          "bias must be broadcast in all leading dimensions or in none");
  }
  const cudaStream_t stream = current_stream(probabilities);
  SoftmaxBackwardLaunch launch = plan_softmax_backward(params, stream);
  Tensor bias_parts = new_tensor({0}, ScalarType::Float, probabilities);
  if (bias_gradient) {
    const bool in_float = needs_float_bias_gradient(launch.params, launch.plan);
    const ScalarType type = in_float ? ScalarType::Float : bias->scalar_type();
    std::vector<int64_t> sizes = sizes_of(*bias);
    sizes.insert(sizes.begin(), launch.params.splits);
    bias_parts = new_tensor(sizes, type, probabilities);
    launch.params.bias_gradient = bias_parts.data_ptr();
    launch.params.bias_gradient_type = dtype_of(type, "bias");
  }
  const auto workspace = set_workspace(launch, probabilities);
  check_cuda(softmax_backward(launch, stream), "softmax_backward");
  if (bias_gradient) bias_parts = sum_of_parts(bias_parts, launch.params.splits, *bias);
  if (bias_gradient && !params.are_linear()) {  // that of the scores is not complete
    params.has_bias_gradient = false;
    SoftmaxBackwardLaunch again = plan_softmax_backward(params, stream);
    const auto its_workspace = set_workspace(again, probabilities);
    check_cuda(softmax_backward(again, stream), "softmax_backward");
  }
  return {std::move(scores_gradient), std::move(bias_parts), std::move(sink_rows)};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor gradient, Tensor probabilities, std::optional<Tensor> lse_gradient,
    std::optional<Tensor> lse, double scale, std::optional<Tensor> bias, bool causal,
    int64_t window_left, int64_t window_right, std::optional<Tensor> first,
    std::optional<Tensor> end, std::optional<Tensor> sink, std::optional<double> sink_value,
    ScalarType dtype, bool bias_gradient, bool sink_gradient) {
  check(gradient.scalar_type() == probabilities.scalar_type(),
        "gradient must have the type of probabilities");
  const torch::stable::accelerator::DeviceGuard guard(probabilities.get_device_index());
  BackwardParams params;
  set_options(params, logit_options(scale, 0, sink, sink_value, probabilities),
              window_of(causal, window_left, window_right), visible_of(first, end, probabilities));
  return gradients_of(gradient, probabilities, lse_gradient, lse, std::nullopt, bias, dtype,
                      bias_gradient, sink_gradient, params);
}

std::tuple<Tensor, Tensor, Tensor> dropout_backward(
    Tensor gradient, Tensor scores, std::optional<Tensor> lse_gradient, Tensor lse, double scale,
    double softcap, std::optional<Tensor> mask, std::optional<Tensor> bias, bool causal,
    int64_t window_left, int64_t window_right, std::optional<Tensor> first,
    std::optional<Tensor> end, std::optional<Tensor> sink, std::optional<double> sink_value,
    ScalarType dtype, bool bias_gradient, bool sink_gradient, double dropout,
    std::optional<Tensor> seed) {
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  BackwardParams params;
  set_options(params, logit_options(scale, softcap, sink, sink_value, scores),
              window_of(causal, window_left, window_right), visible_of(first, end, scores));
  if (dropout > 0 || !params.has_scores()) params.dropout = dropout_of(dropout, seed, scores);
  // Kernels read gradients and scores of one type.
  if (gradient.scalar_type() != scores.scalar_type()) {
    gradient = in_type(gradient, ScalarType::Float);
    scores = in_type(scores, ScalarType::Float);
  }
  return gradients_of(gradient, scores, lse_gradient, lse, mask, bias, dtype, bias_gradient,
                      sink_gradient, params);
}

}  // namespace

void register_softmax(Library& library) {
  implement(library, "softmax_forward", TORCH_BOX(&forward));
  library.impl("softmax_forward.alone", TORCH_BOX(&forward_alone));
  implement(library, "softmax_backward", TORCH_BOX(&backward));
  implement(library, "softmax_dropout_backward", TORCH_BOX(&dropout_backward));
}

}  // namespace megasoftmax

// For ctypes: benchmarks/tune_softmax.py and tests choose regimes.
extern "C" __attribute__((visibility("default"))) void megasoftmax_force_regimes(int forward,
                                                                                 int backward) {
  megasoftmax::force_regimes(forward, backward);
}
