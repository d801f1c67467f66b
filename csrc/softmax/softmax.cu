// Plans a launch for the device at hand, and finds its kernels by element type.

#include <array>

#include "../common/device.h"
#include "instances/instances.h"
#include "softmax.h"
#include "tuning.h"

namespace megasoftmax {

namespace {
std::array<int, 2> forced_regimes = {-1, -1};  // forward, backward
}

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
  return with_dtype(params.scores.type, [&](auto tag) {
    return launchers<SoftmaxLaunchers, decltype(tag)>().forward(launch, stream);
  });
}

cudaError_t softmax_backward(const SoftmaxBackwardLaunch& launch, cudaStream_t stream) {
  const BackwardParams& params = launch.params;
  if (launch.plan.owners.rows() == 0) return cudaSuccess;
  if (!fits_indices(params.shape, params.window)) return cudaErrorInvalidValue;
  return with_dtype(params.probabilities.type, [&](auto tag) {
    return launchers<SoftmaxLaunchers, decltype(tag)>().backward(launch, stream);
  });
}

void force_regimes(int forward, int backward) { forced_regimes = {forward, backward}; }

}  // namespace megasoftmax
