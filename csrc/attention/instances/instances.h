#pragma once
// The launchers of the kernels for each element type. Each .cu beside this file instantiates one
// function for one type, or two, so that no file takes much longer to compile than the others.

#include <cuda_runtime_api.h>

#include "../../common/kernels.h"
#include "../../common/vector.cuh"
#include "../backends.h"

namespace megasoftmax {

// All launches of a pass.
template <class T>
cudaError_t attention_forward_instance(const ForwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t attention_backward_instance(const BackwardLaunch& launch, cudaStream_t stream);

// Those of a backend: backward, gradients of keys and values, and sums of those of queries, after
// the launch that prepares rows. Kernels for different kinds of bias are in different files.
template <class T>
cudaError_t launch_forward(Sm80, const ForwardLaunch& launch, cudaStream_t stream);
template <class T, BiasKind kBias>
cudaError_t launch_backward_with(const BackwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_small_backward(Sm80, const BackwardLaunch& launch, cudaStream_t stream);
template <class T, HopperBias kBias>
cudaError_t launch_forward_with(const ForwardLaunch& launch, cudaStream_t stream);
template <class T, HopperBias kBias>
cudaError_t launch_backward_with(const BackwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_heads(Sm90, const ForwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_heads(Sm90, const BackwardLaunch& launch, cudaStream_t stream);
// The gradient of a bias in order, or its parts, after the launch that prepares rows.
template <class T>
cudaError_t launch_bias_gradient(Sm80, const BackwardLaunch& launch, cudaStream_t stream);
template <class T>
cudaError_t launch_bias_gradient(Sm90, const BackwardLaunch& launch, cudaStream_t stream);

// Whether the code of a backend was compiled for this GPU.
template <class T>
bool has_code(Sm90);

// Calls body.operator()<kind>() for the kind of bias of a portable launch of T.
template <class T, class Body>
cudaError_t with_bias_kind(const AttentionParams& params, Body&& body) {
  switch (bias_kind(params)) {
    case BiasKind::kNone:
      return body.template operator()<BiasKind::kNone>();
    case BiasKind::kTile:
      if constexpr (sizeof(T) == 2) return body.template operator()<BiasKind::kTile>();
      break;
    case BiasKind::kAny:
      return body.template operator()<BiasKind::kAny>();
    case BiasKind::kSoftcap:
      return body.template operator()<BiasKind::kSoftcap>();
  }
  return cudaErrorInvalidValue;
}

// Calls body.operator()<bias>() for a launch of Hopper's kernels.
template <class Body>
cudaError_t with_hopper_bias(HopperBias bias, Body&& body) {
  switch (bias) {
    case HopperBias::kNone:
      return body.template operator()<HopperBias::kNone>();
    case HopperBias::kTile:
      return body.template operator()<HopperBias::kTile>();
    case HopperBias::kTable:
      return body.template operator()<HopperBias::kTable>();
    case HopperBias::kSoftcap:
      return body.template operator()<HopperBias::kSoftcap>();
    case HopperBias::kRows:
      return body.template operator()<HopperBias::kRows>();
    case HopperBias::kKeys:
      return body.template operator()<HopperBias::kKeys>();
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_forward(Sm90, const ForwardLaunch& launch, cudaStream_t stream) {
  if (launch.plan.kernel == ForwardKernel::kHeads) return launch_heads<T>(Sm90{}, launch, stream);
  const HopperBias bias = hopper_bias(launch.params, kAttentionHopperTiles[launch.plan.tile]);
  return with_hopper_bias(
      bias, [&]<HopperBias kBias>() { return launch_forward_with<T, kBias>(launch, stream); });
}

template <class T>
cudaError_t launch_backward(Sm90, const BackwardLaunch& launch, cudaStream_t stream) {
  if (launch.plan.kernel == BackwardKernel::kHeads) return launch_heads<T>(Sm90{}, launch, stream);
  const HopperBias bias =
      hopper_bias(launch.params, kAttentionHopperBackwardTiles[launch.plan.tile]);
  return with_hopper_bias(
      bias, [&]<HopperBias kBias>() { return launch_backward_with<T, kBias>(launch, stream); });
}

template <class T>
cudaError_t launch_backward(Sm80, const BackwardLaunch& launch, cudaStream_t stream) {
  if (launch.plan.kernel == BackwardKernel::kSmall)
    return launch_small_backward<T>(Sm80{}, launch, stream);
  return with_bias_kind<T>(launch.params, [&]<BiasKind kBias>() {
    return launch_backward_with<T, kBias>(launch, stream);
  });
}

template <class T>
bool has_code_for_sm90() {
  if constexpr (Sm90::has_type<T>()) return has_code<T>(Sm90{});
  return false;
}

struct AttentionLaunchers {
  static constexpr const char* kFamily = "attention";
  cudaError_t (*forward)(const ForwardLaunch&, cudaStream_t);
  cudaError_t (*backward)(const BackwardLaunch&, cudaStream_t);
  bool (*has_code_for_sm90)();
};
template <class T>
inline constexpr AttentionLaunchers kAttentionLaunchers = {
    attention_forward_instance<T>, attention_backward_instance<T>, has_code_for_sm90<T>};

}  // namespace megasoftmax
