#pragma once
// From run-time parameters to one kernel: policies from what is present, the regime from the table
// in limits.h.

#include <algorithm>
#include <utility>

#include "../common/launch.cuh"
#include "backward.cuh"
#include "layout.h"
#include "softmax.h"

namespace megasoftmax {

template <int kCount, class Body, int... kIndices>
cudaError_t with_regime(int index, Body&& body, std::integer_sequence<int, kIndices...>) {
  cudaError_t error = cudaErrorInvalidValue;
  static_cast<void>(
      ((index == kIndices && (error = body.template operator()<kIndices>(), true)) || ...));
  return error;
}

// Calls body.operator()<index>() for a row of the table: the kernels are instantiated from it.
template <int kCount, class Body>
cudaError_t with_regime(const RowRegime (&)[kCount], int index, Body&& body) {
  return with_regime<kCount>(index, std::forward<Body>(body),
                             std::make_integer_sequence<int, kCount>{});
}

// Columns that the widest row sees.
inline int64_t visible_columns(const Shape& shape, const Window& window) {
  if (window.left < 0 || window.right < 0) return shape.columns;
  return std::min(shape.columns, window.left + window.right + 1);
}

// Launches one owner per query, head and batch of `shape`, in slices that a grid can hold.
template <class Params>
cudaError_t launch_rows(void (*kernel)(Params, Tiling, RowIndex), const RowRegime& regime,
                        const Shape& shape, int64_t queries_per_tile, int shared_bytes,
                        cudaStream_t stream, const Params& params) {
  constexpr int64_t kMaxYZ = 65535;
  const int64_t blocks = divide_up<int64_t>(shape.queries, regime.rows_per_block);
  const int64_t per_tile =
      std::max(std::min(blocks, divide_up<int64_t>(queries_per_tile, regime.rows_per_block)),
               divide_up<int64_t>(blocks, kMaxYZ));
  const Tiling tiling{static_cast<int>(per_tile), Divider(divide_up(blocks, per_tile))};
  const int64_t batches_per_launch = std::max<int64_t>(kMaxYZ / tiling.tiles.divisor, 1);
  for (int64_t batch = 0; batch < shape.batches; batch += batches_per_launch) {
    for (int64_t head = 0; head < shape.heads; head += kMaxYZ) {
      const int64_t batches = std::min(shape.batches - batch, batches_per_launch);
      const dim3 grid(static_cast<unsigned>(per_tile),
                      static_cast<unsigned>(std::min(shape.heads - head, kMaxYZ)),
                      static_cast<unsigned>(batches * tiling.tiles.divisor));
      MEGASOFTMAX_RETURN_IF_ERROR(
          launch(kernel, grid, dim3(regime.threads()), shared_bytes, stream, params, tiling,
                 RowIndex{static_cast<int>(batch), static_cast<int>(head), 0}));
    }
  }
  return cudaSuccess;
}

// What a launch asks of its rows, but for the bias gradient.
template <class T>
Rows rows_of(const Shape& shape, const Window& window, int64_t visible_chunks, bool is_masked) {
  const int64_t chunks = max_visible_chunks(shape.columns, shape.columns, kPackElements<T>);
  if (chunks >= kLongRow && visible_chunks <= kNarrowRow) return kNarrow;
  return is_masked ? kMasked : window.is_limited() ? kLimited : kPlain;
}

// Shared memory that holds a row between two passes, each thread's chunks in a column of its own.
inline int shared_bytes(const RowRegime& regime, int64_t chunks, int bytes_per_chunk) {
  if (regime.storage != Storage::kShared) return 0;
  return static_cast<int>(divide_up<int64_t>(chunks, regime.threads_per_row)) *
         regime.threads_per_row * bytes_per_chunk;
}

template <class T, class Mask, class Bias>
cudaError_t launch_forward(const ForwardParams& params, cudaStream_t stream) {
  const int64_t visible = visible_columns(params.shape, params.window);
  const int64_t chunks = max_visible_chunks(params.shape.columns, visible, kPackElements<T>);
  const bool shares = shares_between_heads(params.mask, params.shape) ||
                      shares_between_heads(params.bias, params.shape);
  const int64_t queries_per_tile = shares ? kQueriesPerSharedTile : params.shape.queries;
  const int index = regime_for(kForwardRegimes, chunks,
                               rows_of<T>(params.shape, params.window, chunks, Mask::kPresent));
  return with_regime(kForwardRegimes, index, [&]<int kIndex>() {
    constexpr RowRegime kRegime = kForwardRegimes[kIndex];
    constexpr unsigned kPossible = Mask::kPresent ? kMasked | kNarrow : kPlain | kLimited | kNarrow;
    if constexpr ((kRegime.serves & kPossible) == 0) {
      return cudaErrorInvalidValue;  // never chosen
    } else {
      return launch_rows(softmax_forward_kernel<T, Mask, Bias, kIndex>, kRegime, params.shape,
                         queries_per_tile, shared_bytes(kRegime, chunks, sizeof(Pack<T>)), stream,
                         params);
    }
  });
}

template <class T, class Mask>
cudaError_t launch_forward_with_bias(const ForwardParams& params, cudaStream_t stream) {
  if (params.bias.data == nullptr) return launch_forward<T, Mask, NoBias>(params, stream);
  if (params.bias.type == DType::kFloat32)
    return launch_forward<T, Mask, AddedBias<float>>(params, stream);
  return params.bias.type == params.scores.type
             ? launch_forward<T, Mask, AddedBias<T>>(params, stream)
             : cudaErrorInvalidValue;
}

template <class T>
cudaError_t softmax_forward_instance(ForwardParams params, cudaStream_t stream) {
  params.rows = params.shape.rows();
  if (params.rows == 0) return cudaSuccess;
  if (!fits_indices(params.shape, params.window)) return cudaErrorInvalidValue;
  params.can_exclude =
      params.mask.data != nullptr || params.bias.data != nullptr || params.window.is_limited();
  drop_idle_limits(params.window, params.shape);
  merge_dimensions(params.shape, params.window, params.sink,
                   {&params.scores, &params.mask, &params.bias});
  return params.mask.data != nullptr ? launch_forward_with_bias<T, BoolMask>(params, stream)
                                     : launch_forward_with_bias<T, NoMask>(params, stream);
}

// Registers hold a bias row's sums, so every row of the owner must fit them from column 0 on.
inline int64_t backward_chunks(const BackwardParams& params, int pack_elements) {
  if (params.bias_gradient == nullptr) {
    return max_visible_chunks(params.shape.columns, visible_columns(params.shape, params.window),
                              pack_elements);
  }
  return divide_up<int64_t>(params.shape.columns, pack_elements);
}

template <class T, template <int, int> class BiasGradientOf>
cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream) {
  const int64_t chunks = backward_chunks(params, kPackElements<T>);
  constexpr bool kSumsBias = BiasGradientOf<0, kPackElements<T>>::kPresent;
  const Rows rows =
      kSumsBias ? kBiasGradient : rows_of<T>(params.shape, params.window, chunks, false);
  const int index = regime_for(kBackwardRegimes, chunks, rows);
  return with_regime(kBackwardRegimes, index, [&]<int kIndex>() {
    constexpr RowRegime kRegime = kBackwardRegimes[kIndex];
    constexpr unsigned kPossible = kSumsBias ? kBiasGradient : kPlain | kLimited | kNarrow;
    if constexpr ((kRegime.serves & kPossible) == 0) {
      return cudaErrorInvalidValue;  // never chosen
    } else {
      Shape owners = params.bias_shape;
      owners.batches *= params.splits;
      return launch_rows(softmax_backward_kernel<T, BiasGradientOf, kIndex>, kRegime, owners,
                         owners.queries, shared_bytes(kRegime, chunks, 2 * sizeof(Pack<T>)), stream,
                         params);
    }
  });
}

template <class T>
cudaError_t softmax_backward_instance(BackwardParams params, cudaStream_t stream) {
  params.rows = params.shape.rows();
  if (params.bias_gradient == nullptr) params.bias_shape = params.shape;
  if (params.bias_shape.rows() == 0) return cudaSuccess;
  if (!fits_indices(params.shape, params.window)) return cudaErrorInvalidValue;
  drop_idle_limits(params.window, params.shape);
  if (params.bias_gradient == nullptr) {
    merge_dimensions(params.shape, params.window, params.sink,
                     {&params.gradient, &params.probabilities});
    params.bias_shape = params.shape;  // as merged
    return launch_backward<T, NoBiasGradient>(params, stream);
  }
  const Shape &shape = params.shape, &bias = params.bias_shape;
  const Shape shared{shape.batches / bias.batches, shape.heads / bias.heads,
                     shape.queries / bias.queries, 0};
  params.shared_by_queries = Divider(shared.queries);
  params.shared_by_heads = Divider(shared.heads);
  params.rows_per_owner = shared.rows();
  params.rows_per_split = divide_up(shared.rows(), params.splits);
  return launch_backward<T, BiasGradient>(params, stream);
}

}  // namespace megasoftmax
