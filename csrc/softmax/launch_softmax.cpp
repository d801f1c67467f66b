// Plans a launch for the device at hand, and finds its launcher.

#include <array>

#include "../common/device.h"
#include "../common/kernels.h"
#include "softmax.h"
#include "tuning.h"

namespace megasoftmax {

namespace {
std::array<int, 2> forced_regimes = {-1, -1};  // forward, backward

Launchers<SoftmaxForwardLauncher> forward("softmax_forward"),
    masked_forward("softmax_masked_forward"), biased_forward("softmax_biased_forward"),
    biased_masked_forward("softmax_biased_masked_forward"),
    capped_forward("softmax_capped_forward"), dropout_forward("softmax_dropout_forward");
Launchers<SoftmaxBackwardLauncher> backward("softmax_backward"),
    capped_backward("softmax_capped_backward"), dropout_backward("softmax_dropout_backward"),
    dropout_biased_backward("softmax_dropout_biased_backward");

Launchers<SoftmaxForwardLauncher>& launchers_for(const ForwardParams& params) {
  if (params.are_capped_alone()) return capped_forward;
  if (params.dropout.is_given()) return dropout_forward;
  const bool is_masked = params.mask.data != nullptr;
  if (params.takes_bias_instance()) return is_masked ? biased_masked_forward : biased_forward;
  return is_masked ? masked_forward : forward;
}

Launchers<SoftmaxBackwardLauncher>& launchers_for(const BackwardParams& params) {
  if (!params.has_scores()) return backward;
  if (params.are_capped_alone()) return capped_backward;
  return params.takes_bias_instance() ? dropout_biased_backward : dropout_backward;
}
}  // namespace

SoftmaxForwardLaunch plan_softmax_forward(ForwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0) return {params, {}};
  prepare(params);
  return {params, plan_for(stream, [&](const Device& device) {
            return plan_forward(params, forward_table.regimes(), device, forced_regimes[0]);
          })};
}

SoftmaxBackwardLaunch plan_softmax_backward(BackwardParams params, cudaStream_t stream) {
  const Shape& written = params.has_bias_gradient ? params.bias_shape : params.shape;
  if (written.rows() == 0) return {params, {}};
  prepare(params);
  return {params, plan_for(stream, [&](const Device& device) {
            return plan_backward(params, backward_table.regimes(), device, forced_regimes[1]);
          })};
}

cudaError_t softmax_forward(const SoftmaxForwardLaunch& launch, cudaStream_t stream) {
  const ForwardParams& params = launch.params;
  if (params.shape.rows() == 0) return cudaSuccess;
  if (!fits_indices(params.shape, params.window)) return cudaErrorInvalidValue;
  return launchers_for(params).of(params.scores.type)(params, launch.plan, stream);
}

cudaError_t softmax_backward(const SoftmaxBackwardLaunch& launch, cudaStream_t stream) {
  const BackwardParams& params = launch.params;
  if (launch.plan.owners.rows() == 0) return cudaSuccess;
  if (!fits_indices(params.shape, params.window)) return cudaErrorInvalidValue;
  return launchers_for(params).of(params.probabilities.type)(params, launch.plan, stream);
}

void force_regimes(int of_forward, int of_backward) { forced_regimes = {of_forward, of_backward}; }

}  // namespace megasoftmax
