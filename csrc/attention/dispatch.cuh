#pragma once
// The launches of a pass: those of its backend, and what all backends share.

#include "../common/device.h"
#include "../common/launch.cuh"
#include "instances/instances.h"
#include "launches.cuh"
#include "parts.cuh"
#include "sm80/bias_gradient_in_order.cuh"
#include "sm80/query_gradient.cuh"

namespace megasoftmax {

// Adds up parts of rows, where keys are split and blocks have not done so.
template <class T>
cudaError_t launch_combine(const AttentionForwardParams& params, cudaStream_t stream) {
  constexpr int kWarps = kCombineThreads / 32;
  const int64_t blocks = divide_up<int64_t>(params.rows(), kWarps / combine_warps(params.splits));
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int shared_bytes = kWarps * params.value_dim * static_cast<int>(sizeof(float));
  return launch(attention_combine_kernel<T>, dim3(static_cast<unsigned>(blocks)),
                dim3(kCombineThreads), shared_bytes,
                may_overlap(current_device()) ? Together::kOverlapping : Together::kNot, 1, stream,
                params);
}

template <class T>
cudaError_t attention_forward_instance(const ForwardLaunch& launch, cudaStream_t stream) {
  MEGASOFTMAX_RETURN_IF_ERROR(
      with_backend(launch.plan.backend, [&]<class Backend>(Backend backend) {
        if constexpr (Backend::template has_type<T>()) {
          return launch_forward<T>(backend, launch, stream);
        } else {
          return cudaErrorInvalidValue;
        }
      }));
  return launch.plan.splits.take_workspace && launch.plan.kernel != ForwardKernel::kDecode
             ? launch_combine<T>(launch.params, stream)
             : cudaSuccess;
}

// The gradient of a table from sums along diagonals of tiles of so many keys. A template, so that
// files of the forward do not compile its kernels.
template <class T>
cudaError_t launch_diagonals(const AttentionBackwardParams& params, int tile_keys,
                             cudaStream_t stream) {
  const int64_t entries =
      params.bias_batches() * params.bias_heads() * (params.queries + params.keys - 1);
  const auto launch_with = [&]<int kKeys>() {
    return launch_flat(attention_diagonals_kernel<kKeys>, entries * kDiagonalLanes, 256, stream,
                       params);
  };
  switch (tile_keys) {
    case 32:
      return launch_with.template operator()<32>();
    case 64:
      return launch_with.template operator()<64>();
    case 128:
      return launch_with.template operator()<128>();
    default:
      return cudaErrorInvalidValue;
  }
}

// The gradient of a bias from sums of parts, if there are several.
template <class T>
cudaError_t launch_bias_parts(const AttentionBackwardParams& params, cudaStream_t stream) {
  if (params.bias_parts == 1) return cudaSuccess;
  return launch_flat(attention_bias_parts_kernel<T>,
                     divide_up<int64_t>(params.bias_entries(), entries_of_bias_part_block(params)) *
                         kThreadsOfBiasParts,
                     kThreadsOfBiasParts, stream, params);
}

// With as many lanes for a row as it has vectors.
template <class T>
cudaError_t launch_rows(const AttentionBackwardParams& params, cudaStream_t stream) {
  const auto launch_with = [&]<int kLanes>() {
    return launch_flat(attention_rows_kernel<T, kLanes>, params.rows() * kLanes, kThreadsOfRows,
                       stream, params);
  };
  if (params.value_dim <= 32) return launch_with.template operator()<4>();
  if (params.value_dim <= 64) return launch_with.template operator()<8>();
  if constexpr (sizeof(T) == 2 || kMaxFloatHeadDim > 128) {
    if (params.value_dim > 128) return launch_with.template operator()<32>();
  }
  return launch_with.template operator()<16>();
}

template <class T>
cudaError_t attention_backward_instance(const BackwardLaunch& launch, cudaStream_t stream) {
  const BackwardPlan& plan = launch.plan;
  if (plan.kernel == BackwardKernel::kSmall) {
    MEGASOFTMAX_RETURN_IF_ERROR(launch_backward<T>(Sm80{}, launch, stream));
    return plan.bias_gradient == BiasGradient::kNone ? cudaSuccess
                                                     : launch_bias_parts<T>(launch.params, stream);
  }
  const bool is_in_order = plan.bias_gradient == BiasGradient::kInOrder;
  BackwardLaunch keys = launch;  // without a gradient of the bias that has a launch of its own
  AttentionBackwardParams& params = keys.params;
  if (is_in_order) {
    params.bias_gradient_kind = BiasGradient::kNone;
    params.bias_gradient = nullptr;
  }
  // Each entry of a dense gradient is written, once, where no tile is left out.
  const bool has_window = params.window_left >= 0 || params.window_right >= 0;
  const bool is_complete = !has_window && plan.bias_gradient == BiasGradient::kDense &&
                           params.block_mask.words == nullptr;
  if (params.bias_gradient != nullptr && !is_complete && !plan.clears_bias_gradient)
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaMemsetAsync(params.bias_gradient, 0, params.bias_gradient_bytes, stream));
  MEGASOFTMAX_RETURN_IF_ERROR(launch_rows<T>(params, stream));
  params.takes_all_queries = plan.query_gradient == QueryGradient::kWhole;
  if (params.turns != nullptr) {
    params.order_of_turns = plan.order_of_turns;
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaMemsetAsync(params.turns, 0, params.turn_count() * sizeof(uint32_t), stream));
  }
  MEGASOFTMAX_RETURN_IF_ERROR(with_backend(plan.backend, [&]<class Backend>(Backend backend) {
    if constexpr (Backend::template has_type<T>()) {
      return launch_backward<T>(backend, keys, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  }));
  if (plan.bias_gradient == BiasGradient::kDiagonals)
    MEGASOFTMAX_RETURN_IF_ERROR(launch_diagonals<T>(params, plan.tile_keys, stream));
  if (params.query_gradient_sum != nullptr)
    MEGASOFTMAX_RETURN_IF_ERROR(launch_flat(attention_query_gradient_kernel<T>,
                                            params.rows() * params.head_dim / 8, 256, stream,
                                            params));
  if (!is_in_order || params.bias_entries() == 0) return cudaSuccess;
  MEGASOFTMAX_RETURN_IF_ERROR(
      with_backend(plan.in_order.backend, [&]<class Backend>(Backend backend) {
        if constexpr (Backend::template has_type<T>()) {
          return launch_bias_gradient<T>(backend, launch, stream);
        } else {
          return cudaErrorInvalidValue;
        }
      }));
  return launch_bias_parts<T>(launch.params, stream);
}

}  // namespace megasoftmax
