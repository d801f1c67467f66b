#pragma once
// The launchers that all backends share, before and after those of tiles.

#include "../common/device.h"
#include "../common/launch.cuh"
#include "../common/registration.h"
#include "attention.h"
#include "launches.cuh"
#include "parts.cuh"
#include "rows_of_backward.cuh"
#include "sm80/bias_gradient_in_order.cuh"
#include "sm80/query_gradient.cuh"

namespace megasoftmax {

// Adds up parts of rows, where keys are split and blocks have not done so.
template <class T>
cudaError_t launch_combine(const ForwardLaunch& launch, cudaStream_t stream) {
  const AttentionForwardParams& params = launch.params;
  constexpr int kWarps = kCombineThreads / 32;
  const int64_t blocks = divide_up<int64_t>(params.rows(), kWarps / combine_warps(params.splits));
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int shared_bytes = kWarps * params.value_dim * static_cast<int>(sizeof(float));
  return megasoftmax::launch(attention_combine_kernel<T>, dim3(static_cast<unsigned>(blocks)),
                             dim3(kCombineThreads), shared_bytes, overlapping(), 1, stream, params);
}

// The gradient of a table from sums along diagonals of tiles. Each library of steps has these
// kernels, and T is there for the name alone.
template <class T>
cudaError_t launch_diagonals(const BackwardLaunch& launch, cudaStream_t stream) {
  const AttentionBackwardParams& params = launch.params;
  const int64_t entries =
      params.bias_batches() * params.bias_heads() * (params.queries + params.keys - 1);
  const auto launch_with = [&]<int kKeys>() {
    return launch_flat(attention_diagonals_kernel<kKeys>, entries * kDiagonalLanes, 256, stream,
                       params);
  };
  switch (launch.plan.tile_keys) {
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
cudaError_t launch_bias_parts(const BackwardLaunch& launch, cudaStream_t stream) {
  const AttentionBackwardParams& params = launch.params;
  if (params.bias_parts == 1) return cudaSuccess;
  return launch_flat(attention_bias_parts_kernel<T>,
                     divide_up<int64_t>(params.bias_entries(), entries_of_bias_part_block(params)) *
                         kThreadsOfBiasParts,
                     kThreadsOfBiasParts, stream, params, overlapping());
}

// With as many lanes for a row as it has vectors.
template <class T>
cudaError_t launch_rows(const BackwardLaunch& launch, cudaStream_t stream) {
  const AttentionBackwardParams& params = launch.params;
  const auto launch_with = [&]<int kLanes>() {
    return launch_flat(attention_rows_kernel<T, kLanes>, params.rows_of_launches() * kLanes,
                       kThreadsOfRows, stream, params);
  };
  if (params.value_dim <= 32) return launch_with.template operator()<4>();
  if (params.value_dim <= 64) return launch_with.template operator()<8>();
  if constexpr (sizeof(T) == 2 || kMaxFloatHeadDim > 128) {
    if (params.value_dim > 128) return launch_with.template operator()<32>();
  }
  return launch_with.template operator()<16>();
}

// Gradients of queries from their sums.
template <class T>
cudaError_t launch_query_gradient(const BackwardLaunch& launch, cudaStream_t stream) {
  const AttentionBackwardParams& params = launch.params;
  // It reads sums before it waits. Only launches in order let it begin when the sums are complete.
  return launch_flat(attention_query_gradient_kernel<T>,
                     params.rows_of_launches() * params.head_dim / 8, 256, stream, params,
                     sums_bias_in_order(launch) ? overlapping() : Together::kNot);
}

}  // namespace megasoftmax
