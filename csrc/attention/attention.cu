// Plans launches on the current device, and finds its kernels by element type.

#include <atomic>

#include "../common/device.h"
#include "../common/launch.cuh"
#include "attention.h"
#include "backends.h"
#include "instances/instances.h"

namespace megasoftmax {
namespace {

// Calls body(T{}) for the type of the queries, as products take it.
template <class Body>
cudaError_t with_type(const AttentionParams& params, Body&& body) {
  if (params.query.type == DType::kFloat32 && params.is_tf32) return body(Tf32{});
  return with_dtype(params.query.type, body);
}

std::atomic<bool> are_portable_alone{false};

// has_code(Sm90{}) of a launch, for backends.h.
template <class Params>
auto code_for(const Params& params) {
  return [&params](Sm90) {
    bool is_there = false;
    if (are_portable_alone || params.rows() == 0) return is_there;
    with_type(params, [&](auto of_type) {
      is_there = launchers<AttentionLaunchers, decltype(of_type)>().has_code_for_sm90();
      return cudaSuccess;
    });
    return is_there;
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
  launch.params.bias_gradient_kind = launch.plan.bias_gradient;
  launch.params.bias_parts = launch.plan.in_order.parts;
  return launch;
}

cudaError_t attention_forward(const ForwardLaunch& launch, cudaStream_t stream) {
  if (launch.params.rows() == 0) return cudaSuccess;
  if (!is_valid(launch.params)) return cudaErrorInvalidValue;
  return with_type(launch.params, [&](auto of_type) {
    return launchers<AttentionLaunchers, decltype(of_type)>().forward(launch, stream);
  });
}

cudaError_t attention_backward(const BackwardLaunch& launch, cudaStream_t stream) {
  if (launch.params.batches == 0 || launch.params.heads == 0) return cudaSuccess;
  if (!is_valid(launch.params) || is_wide(launch.params)) return cudaErrorInvalidValue;
  return with_type(launch.params, [&](auto of_type) {
    return launchers<AttentionLaunchers, decltype(of_type)>().backward(launch, stream);
  });
}

}  // namespace megasoftmax

// For tests and benchmarks: kernels for one architecture alone are left out, or not.
extern "C" __attribute__((visibility("default"))) void megasoftmax_use_portable_attention(
    int is_alone) {
  megasoftmax::are_portable_alone = is_alone != 0;
}
