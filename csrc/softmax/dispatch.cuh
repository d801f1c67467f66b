#pragma once
// From a plan to one kernel: policies from what is present, the kernel's shape from its regime.

#include <algorithm>

#include "../common/launch.cuh"
#include "../common/registration.h"
#include "backward.cuh"
#include "contiguous.cuh"
#include "flat.cuh"
#include "forward.cuh"
#include "softmax.h"

namespace megasoftmax {

// Launches persistent blocks: as many as run at a time.
template <class Params>
cudaError_t launch_persistent(void (*kernel)(Params, Schedule), const Plan& plan,
                              cudaStream_t stream, const Params& params) {
  Schedule schedule = plan.schedule;
  const bool is_spread = !schedule.is_cluster;  // over the whole GPU
  int64_t resident = 0;
  MEGASOFTMAX_RETURN_IF_ERROR(resident_clusters(kernel, plan.threads, plan.shared_bytes,
                                                is_spread ? 1 : schedule.blocks_per_row,
                                                plan.multiprocessors, resident));
  schedule.rows = static_cast<int>(plan.owners.rows());
  schedule.queries = Divider(plan.owners.queries);
  schedule.heads = Divider(plan.owners.heads);
  const int64_t most = is_spread ? schedule.owners : schedule.rows;
  schedule.owners = static_cast<int>(std::clamp<int64_t>(resident, 1, most));
  if (is_spread) {
    schedule.blocks_per_row = static_cast<int>(
        std::clamp<int64_t>(resident / schedule.owners, 1, schedule.blocks_per_row));
  }
  schedule.divide_segments = Divider(schedule.blocks_per_row);
  const dim3 grid(static_cast<unsigned>(schedule.owners * schedule.blocks_per_row));
  return launch(kernel, grid, dim3(plan.threads), plan.shared_bytes,
                is_spread ? Together::kAll : Together::kInClusters, schedule.blocks_per_row, stream,
                params, schedule);
}

// Launches blocks for each query, head and batch of plan.owners, in slices that a grid can hold.
template <class Params>
cudaError_t launch_rows(void (*kernel)(Params, Schedule), const KernelShape& kernel_shape,
                        const Plan& plan, cudaStream_t stream, const Params& params) {
  if (kernel_shape.is_persistent) return launch_persistent(kernel, plan, stream, params);
  constexpr int64_t kMaxYZ = 65535;
  const Shape& owners = plan.owners;
  const int64_t blocks = plan.blocks_per_head;
  Schedule schedule = plan.schedule;
  schedule.divide_segments = Divider(schedule.blocks_per_row);
  const int64_t wanted = blocks_of_queries(kernel_shape, plan.kind, plan.queries_per_tile);
  const int64_t per_tile = std::max(std::min(blocks, wanted), divide_up<int64_t>(blocks, kMaxYZ));
  schedule.blocks_per_tile = static_cast<int>(per_tile);
  schedule.last_first = params.window.left < 0 && params.window.right >= 0;
  schedule.tiles = Divider(divide_up(blocks, per_tile));
  const Together together = schedule.is_cluster ? Together::kInClusters : Together::kNot;
  const int64_t batches_per_launch = std::max<int64_t>(kMaxYZ / schedule.tiles.divisor, 1);
  for (int64_t batch = 0; batch < owners.batches; batch += batches_per_launch) {
    for (int64_t head = 0; head < owners.heads; head += kMaxYZ) {
      const int64_t batches = std::min(owners.batches - batch, batches_per_launch);
      const dim3 grid(static_cast<unsigned>(per_tile * schedule.blocks_per_row),
                      static_cast<unsigned>(std::min(owners.heads - head, kMaxYZ)),
                      static_cast<unsigned>(batches * schedule.tiles.divisor));
      schedule.first = {static_cast<int>(batch), static_cast<int>(head), 0};
      MEGASOFTMAX_RETURN_IF_ERROR(launch(kernel, grid, dim3(plan.threads), plan.shared_bytes,
                                         together, schedule.blocks_per_row, stream, params,
                                         schedule));
    }
  }
  return cudaSuccess;
}

template <class T, class Mask, class Bias>
cudaError_t launch_forward(const ForwardParams& params, const Plan& plan, cudaStream_t stream) {
  return with_regime(kForwardShapes, kForwardRegimes[plan.regime].shape, [&]<int kIndex>() {
    constexpr RowShape kShape = kForwardShapes[kIndex];
    constexpr unsigned kPossible =
        Mask::kDrops  ? kDropped
        : Bias::kCaps ? kUnmasked | kRagged | kLimited | kWindowed | kContiguous | kContiguousRagged
        : Bias::kPresent ? kBiasOrRaggedMask | kWindowed
        : Mask::kPresent ? kMasked | kBiasOrRaggedMask | kWindowed
        : Mask::kMayHaveRange
            ? kLimited | kWindowed
            : kUnmasked | kRagged | kLimited | kWindowed | kTiny | kContiguous | kContiguousRagged;
    if constexpr ((rows_of_shape(kForwardRegimes, kIndex) & kPossible) == 0) {
      return cudaErrorInvalidValue;  // never chosen
    } else if constexpr (kShape.storage == Storage::kTile) {
      return launch_flat_forward<T>(params, stream);
    } else if constexpr (kShape.storage == Storage::kContiguous) {
      return launch_contiguous_forward<T, Bias, kIndex>(params, plan, stream);
    } else {
      return launch_rows(softmax_forward_kernel<T, Mask, Bias, kernel_of(kForwardShapes, kIndex)>,
                         kShape.kernel(), plan, stream, params);
    }
  });
}

template <class T, class Mask>
cudaError_t launch_forward_with_bias(const ForwardParams& params, const Plan& plan,
                                     cudaStream_t stream) {
  if (params.bias.type == DType::kFloat32)
    return launch_forward<T, Mask, AddedBias<float>>(params, plan, stream);
  return params.bias.type == params.scores.type
             ? launch_forward<T, Mask, AddedBias<T>>(params, plan, stream)
             : cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_softmax_biased_forward(const ForwardParams& params, const Plan& plan,
                                          cudaStream_t stream) {
  return launch_forward_with_bias<T, NoMask>(params, plan, stream);
}

template <class T>
cudaError_t launch_softmax_biased_masked_forward(const ForwardParams& params, const Plan& plan,
                                                 cudaStream_t stream) {
  return launch_forward_with_bias<T, BoolMask>(params, plan, stream);
}

template <class T>
cudaError_t launch_softmax_masked_forward(const ForwardParams& params, const Plan& plan,
                                          cudaStream_t stream) {
  return launch_forward<T, BoolMask, NoBias>(params, plan, stream);
}

template <class T>
cudaError_t launch_softmax_forward(const ForwardParams& params, const Plan& plan,
                                   cudaStream_t stream) {
  return params.visible.are_given() ? launch_forward<T, RangeAlone, NoBias>(params, plan, stream)
                                    : launch_forward<T, NoMask, NoBias>(params, plan, stream);
}

template <class T>
cudaError_t launch_softmax_capped_forward(const ForwardParams& params, const Plan& plan,
                                          cudaStream_t stream) {
  return launch_forward<T, NoMask, CapAlone>(params, plan, stream);
}

// Few instances, because the slowest step, the bits of dropout, is the same in all.
template <class T>
cudaError_t launch_softmax_dropout_forward(const ForwardParams& params, const Plan& plan,
                                           cudaStream_t stream) {
  if (params.takes_bias_instance())
    return launch_forward_with_bias<T, Dropped<PossibleMask>>(params, plan, stream);
  return params.mask.data != nullptr
             ? launch_forward<T, Dropped<BoolMask>, NoBias>(params, plan, stream)
             : launch_forward<T, Dropped<RangeAlone>, NoBias>(params, plan, stream);
}

template <class Inputs, template <KernelShape, int> class BiasGradientOf>
cudaError_t launch_backward(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  return with_regime(kBackwardShapes, kBackwardRegimes[plan.regime].shape, [&]<int kIndex>() {
    constexpr RowShape kShape = kBackwardShapes[kIndex];
    using T = typename Inputs::Element;
    using Biases = BiasGradientOf<kShape.kernel(), kPackElements<T>>;
    constexpr unsigned kPossible =
        Inputs::kMayDrop   ? (Biases::kPresent ? kDroppedBiasGradient : kDropped)
        : Biases::kPresent ? kBiasGradient
                           : kUnmasked | kRagged | kLimited | kWindowed | kContiguous |
                                 kContiguousRagged | (Inputs::kMakes ? 0u : kTiny);
    if constexpr ((rows_of_shape(kBackwardRegimes, kIndex) & kPossible) == 0) {
      return cudaErrorInvalidValue;  // never chosen
    } else if constexpr (kShape.storage == Storage::kTile) {
      return launch_flat_backward<T>(params, stream);
    } else if constexpr (kShape.storage == Storage::kContiguous) {
      using Bias = std::conditional_t<Inputs::kMakes, CapAlone, NoBias>;
      return launch_contiguous_backward<T, Bias, kIndex>(params, plan, stream);
    } else {
      return launch_rows(
          softmax_backward_kernel<Inputs, BiasGradientOf, kernel_of(kBackwardShapes, kIndex)>,
          kShape.kernel(), plan, stream, params);
    }
  });
}

template <class T>
cudaError_t launch_softmax_backward(const BackwardParams& params, const Plan& plan,
                                    cudaStream_t stream) {
  using Inputs = ProbabilitiesRead<T>;
  return !params.has_bias_gradient ? launch_backward<Inputs, NoBiasGradient>(params, plan, stream)
                                   : launch_backward<Inputs, BiasGradient>(params, plan, stream);
}

template <class T>
cudaError_t launch_softmax_capped_backward(const BackwardParams& params, const Plan& plan,
                                           cudaStream_t stream) {
  return launch_backward<CappedScoresRead<T>, NoBiasGradient>(params, plan, stream);
}

template <class T>
cudaError_t launch_softmax_dropout_biased_backward(const BackwardParams& params, const Plan& plan,
                                                   cudaStream_t stream) {
  const auto launch_with_bias = [&]<class Bias>() {
    using Inputs = ProbabilitiesMadeAgain<T, PossibleMask, Bias>;
    return !params.has_bias_gradient ? launch_backward<Inputs, NoBiasGradient>(params, plan, stream)
                                     : launch_backward<Inputs, BiasGradient>(params, plan, stream);
  };
  if (params.bias.type == DType::kFloat32)
    return launch_with_bias.template operator()<AddedBias<float>>();
  return params.bias.type == params.probabilities.type
             ? launch_with_bias.template operator()<AddedBias<T>>()
             : cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_softmax_dropout_backward(const BackwardParams& params, const Plan& plan,
                                            cudaStream_t stream) {
  return params.mask.data != nullptr
             ? launch_backward<ProbabilitiesMadeAgain<T, BoolMask, NoBias>, NoBiasGradient>(
                   params, plan, stream)
             : launch_backward<ProbabilitiesMadeAgain<T, RangeAlone, NoBias>, NoBiasGradient>(
                   params, plan, stream);
}

}  // namespace megasoftmax
