// Plans a launch for the device at hand, and finds its launcher.

#include "../common/device.h"
#include "../common/kernels.h"
#include "topk.h"

namespace megasoftmax {

namespace {
int forced_regime = -1;

// capped_forward serves rows of unit stride that are capped alone.
Launchers<TopkForwardLauncher> forward("topk_forward"), capped_forward("topk_capped_forward");
Launchers<TopkBackwardLauncher> backward("topk_backward");

bool is_valid(const TopkParams& params) {
  return fits_indices(params.shape, Window{}) && params.k >= 0 && params.k <= kMaxK;
}

// What routers take.
bool is_valid_router(const TopkForwardParams& params) {
  return params.is_contiguous && !params.can_exclude && params.have_plain_rows() &&
         !params.candidates && params.k <= kTileMaxK && params.shape.columns <= kRouterMaxColumns &&
         params.shape.columns * size_of(params.scores.type) % 16 == 0;
}
}  // namespace

TopkForwardLaunch plan_softmax_topk_forward(TopkForwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0 || !is_valid(params)) return {params, {}};
  prepare(params);
  return {params, plan_for(stream, [&](const Device& device) {
            return plan_topk_forward(params, device, forced_regime);
          })};
}

TopkBackwardLaunch plan_softmax_topk_backward(TopkBackwardParams params) {
  if (params.shape.rows() == 0 || !is_valid(params)) return {params, {}};
  prepare(params);
  return {params, plan_topk_backward(params, current_device())};
}

cudaError_t topk_forward(const TopkForwardLaunch& launch, cudaStream_t stream) {
  const TopkForwardParams& params = launch.params;
  if (params.shape.rows() == 0) return cudaSuccess;
  if (!is_valid(params) || params.k > params.shape.columns) return cudaErrorInvalidValue;
  if (params.are_of_router() && !is_valid_router(params)) return cudaErrorInvalidValue;
  const bool is_capped = params.are_capped_alone() && launch.plan.has_unit_stride;
  return (is_capped ? capped_forward : forward).of(params.scores.type)(params, launch.plan, stream);
}

cudaError_t topk_backward(const TopkBackwardLaunch& launch, cudaStream_t stream) {
  const TopkBackwardParams& params = launch.params;
  if (params.shape.rows() == 0 || params.shape.columns == 0) return cudaSuccess;
  if (!is_valid(params)) return cudaErrorInvalidValue;
  return backward.of(params.scores.type)(params, launch.plan, stream);
}

void force_topk_regime(int regime) { forced_regime = regime; }

}  // namespace megasoftmax
