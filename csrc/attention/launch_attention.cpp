// Plans launches on the current device, and calls their launchers in order.

#include <atomic>

#include "../common/cuda_error.h"
#include "../common/device.h"
#include "../common/kernels.h"
#include "attention.h"
#include "backends.h"

namespace megasoftmax {
namespace {

using Forward = AttentionForwardLauncher;
using Backward = AttentionBackwardLauncher;

// The launchers of Hopper's tiles, in the order of HopperBias. Most are in libraries of their own:
// they take long to compile, and few calls need them.
Launchers<Forward> hopper_forward[] = {
    "attention_hopper_forward",
    "attention_biased_hopper_forward",
    "attention_biased_hopper_table_forward",
    "attention_capped_hopper_forward",
    "attention_biased_hopper_rows_forward",
    "attention_biased_hopper_keys_forward",
};
Launchers<Backward> hopper_backward[] = {
    "attention_hopper_backward",
    "attention_biased_hopper_backward",
    "attention_biased_hopper_table_backward",
    "attention_capped_hopper_backward",
    "attention_biased_hopper_rows_backward",
    "attention_biased_hopper_keys_backward",
};
Launchers<Backward> masked_hopper_backward("attention_biased_hopper_masked_backward");
Launchers<Forward> heads_forward("attention_biased_hopper_heads_forward");
Launchers<Forward> portable_forward("attention_portable_forward");
Launchers<Forward> biased_forward("attention_biased_forward");
Launchers<Forward> capped_forward("attention_capped_forward");
Launchers<Forward> combine("attention_steps_combine");
Launchers<Backward> heads_backward("attention_hopper_heads_backward");
Launchers<Backward> portable_backward("attention_portable_backward");
Launchers<Backward> biased_backward("attention_biased_backward");
Launchers<Backward> biased_dense_backward("attention_biased_dense_backward");
Launchers<Backward> capped_backward("attention_capped_backward");
Launchers<Backward> rows("attention_steps_rows");
Launchers<Backward> diagonals("attention_steps_diagonals");
Launchers<Backward> query_gradient("attention_steps_query_gradient");
Launchers<Backward> bias_gradient("attention_biased_bias_gradient");
Launchers<Backward> hopper_bias_gradient("attention_biased_hopper_bias_gradient");
Launchers<Backward> bias_parts("attention_steps_bias_parts");

Launchers<Forward>& tile_launchers(const ForwardLaunch& launch) {
  const auto& [params, plan] = launch;
  if (plan.kernel == ForwardKernel::kHeads) return heads_forward;
  if (plan.backend == BackendId::kSm90) {
    const HopperBias bias = hopper_bias(params, kAttentionHopperTiles[plan.tile]);
    return hopper_forward[static_cast<int>(bias)];
  }
  const BiasKind kind = bias_kind(params);
  if (plan.kernel != ForwardKernel::kTiles || kind == BiasKind::kNone) return portable_forward;
  return kind == BiasKind::kSoftcap ? capped_forward : biased_forward;
}

Launchers<Backward>& tile_launchers(const BackwardLaunch& launch) {
  const auto& [params, plan] = launch;
  if (plan.kernel == BackwardKernel::kHeads) return heads_backward;
  if (plan.kernel == BackwardKernel::kSmall) return portable_backward;
  if (plan.backend == BackendId::kSm90) {
    const HopperBias bias = hopper_bias(params, kAttentionHopperBackwardTiles[plan.tile]);
    const bool has_any_mask = hopper_mask(params) == HopperMask::kAny;
    return bias == HopperBias::kTile && has_any_mask ? masked_hopper_backward
                                                     : hopper_backward[static_cast<int>(bias)];
  }
  const BiasKind kind = bias_kind(params);
  if (kind == BiasKind::kNone) return portable_backward;
  if (kind == BiasKind::kSoftcap) return capped_backward;
  return kind == BiasKind::kTile ? biased_dense_backward : biased_backward;
}

// The launcher for the type of the queries, as products take it.
template <class Launcher>
Launcher& launcher_for(const AttentionParams& params, Launchers<Launcher>& launchers) {
  const DType type = params.query.type;
  return launchers.of(type, type == DType::kFloat32 && params.is_tf32);
}
template <class Launcher, class Launch>
cudaError_t call(Launchers<Launcher>& launchers, const Launch& launch, cudaStream_t stream) {
  return launcher_for(launch.params, launchers)(launch, stream);
}

std::atomic<bool> are_portable_alone{false};

// has_code(Sm90{}) of a launch, for backends.h.
template <class Params>
auto code_for(const Params& params) {
  return [&params](Sm90) {
    return !are_portable_alone && params.rows() != 0 && params.query.type != DType::kFloat32 &&
           has_hopper_code();
  };
}

}  // namespace

ForwardLaunch plan_attention_forward(const AttentionForwardParams& params, cudaStream_t stream) {
  ForwardLaunch launch{params, forward_plan(params, current_device(), code_for(params))};
  // Blocks that wait for each other need room at the same time; the driver takes a while to tell.
  if (launch.plan.kernel == ForwardKernel::kDecode && launch.plan.splits.count > 1)
    launch.plan = forward_plan(params, device_at_hand(stream), code_for(params));
  launch.params.splits = launch.plan.splits.count;
  launch.params.bias_stages = launch.plan.bias_stages;
  launch.params.bias_parts = launch.plan.bias_parts;
  launch.params.row_tiles = Divider(launch.plan.row_tiles);
  return launch;
}

BackwardLaunch plan_attention_backward(const AttentionBackwardParams& params,
                                       bool is_deterministic) {
  BackwardLaunch launch{
      params, backward_plan(params, is_deterministic, current_device(), code_for(params))};
  launch.params.stages = launch.plan.stages;
  launch.params.query_gradient_kind = launch.plan.query_gradient;
  launch.params.query_sums = launch.plan.query_sums;
  launch.params.order = launch.plan.order;
  launch.params.sections_apart = launch.plan.sections_apart;
  launch.params.pieces_of_head = Divider(divide_up(params.queries, kRowsOfWorkerPiece));
  launch.params.bias_gradient_kind = launch.plan.bias_gradient;
  launch.params.bias_parts = launch.plan.in_order.parts;
  return launch;
}

cudaError_t attention_forward(const ForwardLaunch& launch, cudaStream_t stream) {
  if (launch.params.rows() == 0) return cudaSuccess;
  if (!is_valid(launch.params)) return cudaErrorInvalidValue;
  const bool combines =
      launch.plan.splits.take_workspace && launch.plan.kernel != ForwardKernel::kDecode;
  // Libraries of kernels are built before anything is launched.
  if (combines) launcher_for(launch.params, combine);
  MEGASOFTMAX_RETURN_IF_ERROR(call(tile_launchers(launch), launch, stream));
  return combines ? call(combine, launch, stream) : cudaSuccess;
}

cudaError_t attention_backward(const BackwardLaunch& launch, cudaStream_t stream) {
  if (launch.params.batches == 0 || launch.params.heads == 0) return cudaSuccess;
  if (!is_valid(launch.params) || is_wide(launch.params)) return cudaErrorInvalidValue;
  const BackwardPlan& plan = launch.plan;
  if (plan.kernel == BackwardKernel::kSmall) {
    const bool adds_parts = plan.bias_gradient != BiasGradient::kNone && plan.in_order.parts > 1;
    if (adds_parts) launcher_for(launch.params, bias_parts);  // as in attention_forward
    MEGASOFTMAX_RETURN_IF_ERROR(call(tile_launchers(launch), launch, stream));
    return adds_parts ? call(bias_parts, launch, stream) : cudaSuccess;
  }
  const bool is_in_order = plan.bias_gradient == BiasGradient::kInOrder;
  Launchers<Backward>& of_bias =
      plan.in_order.backend == BackendId::kSm90 ? hopper_bias_gradient : bias_gradient;
  BackwardLaunch keys = launch;  // without a gradient of the bias that has a launch of its own
  AttentionBackwardParams& params = keys.params;
  if (is_in_order) {
    params.bias_gradient_kind = BiasGradient::kNone;
    params.bias_gradient = nullptr;
  }
  Launchers<Backward>& tiles = tile_launchers(keys);
  // As in attention_forward. Other launchers are in the library of rows, attention_steps.
  launcher_for(params, tiles);
  launcher_for(params, rows);
  if (is_in_order) launcher_for(params, of_bias);
  // Each entry of a dense gradient is written, once, where no tile is left out.
  const bool has_window = params.window_left >= 0 || params.window_right >= 0;
  const bool is_complete = !has_window && plan.bias_gradient == BiasGradient::kDense &&
                           params.block_mask.words == nullptr;
  if (params.bias_gradient != nullptr && !is_complete && !plan.clears_bias_gradient)
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaMemsetAsync(params.bias_gradient, 0, params.bias_gradient_bytes, stream));
  MEGASOFTMAX_RETURN_IF_ERROR(call(rows, keys, stream));
  params.takes_all_queries = plan.query_gradient == QueryGradient::kWhole;
  if (params.turns != nullptr) {
    params.order_of_turns = plan.order_of_turns;
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaMemsetAsync(params.turns, 0, params.turn_count() * sizeof(uint32_t), stream));
  }
  MEGASOFTMAX_RETURN_IF_ERROR(call(tiles, keys, stream));
  if (plan.bias_gradient == BiasGradient::kDiagonals)
    MEGASOFTMAX_RETURN_IF_ERROR(call(diagonals, keys, stream));
  // On Hopper, the launch in order needs no results of tiles, and the one for dQ none of launches
  // in order. So each begins before the one before has ended, and waits for it before it ends.
  if (sums_bias_in_order(launch)) {
    MEGASOFTMAX_RETURN_IF_ERROR(call(of_bias, launch, stream));
    MEGASOFTMAX_RETURN_IF_ERROR(call(bias_parts, launch, stream));
  }
  return params.query_gradient_sum == nullptr ? cudaSuccess : call(query_gradient, keys, stream);
}

}  // namespace megasoftmax

// For tests and benchmarks: kernels for one architecture alone are left out, or not.
extern "C" __attribute__((visibility("default"))) void megasoftmax_use_portable_attention(
    int is_alone) {
  megasoftmax::are_portable_alone = is_alone != 0;
}
