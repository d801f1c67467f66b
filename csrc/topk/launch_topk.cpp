// Plans a launch for the device at hand, and finds its launcher.

#include "../common/device.h"
#include "../common/kernels.h"
#include "topk.h"

namespace megasoftmax {

namespace {
int forced_regime = -1;

Launchers<TopkForwardLauncher> forward("topk_forward");
Launchers<TopkForwardLauncher> capped_forward("topk_capped_forward");
Launchers<TopkForwardLauncher> tiles_forward("topk_tiles_forward");
Launchers<TopkBackwardLauncher> backward("topk_backward");

Launchers<TopkForwardLauncher>& launchers_for(const TopkForwardLaunch& launch) {
  const auto& [params, plan] = launch;
  if (params.are_capped_alone() && plan.has_unit_stride) return capped_forward;
  const bool has_tiles = plan.regime == kTopkTile || plan.regime == kTopkRouter;
  return has_tiles ? tiles_forward : forward;
}

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
  return launchers_for(launch).of(params.scores.type)(params, launch.plan, stream);
}

cudaError_t topk_backward(const TopkBackwardLaunch& launch, cudaStream_t stream) {
  const TopkBackwardParams& params = launch.params;
  if (params.shape.rows() == 0 || params.shape.columns == 0) return cudaSuccess;
  if (!is_valid(params)) return cudaErrorInvalidValue;
  return backward.of(params.scores.type)(params, launch.plan, stream);
}

void force_topk_regime(int regime) { forced_regime = regime; }

}  // namespace megasoftmax
