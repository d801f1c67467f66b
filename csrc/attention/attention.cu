// Selects the instance by element type.

#include <atomic>

#include "../common/device.h"
#include "../common/launch.cuh"
#include "attention.h"
#include "instances/instances.h"
#include "plan.h"

namespace megasoftmax {
namespace {

// Calls body(T{}) for the type of the queries, as products take it.
template <class Body>
cudaError_t with_type(const AttentionParams& params, Body&& body) {
  if (params.query.type == DType::kFloat32 && params.is_tf32) return body(Tf32{});
  return with_dtype(params.query.type, body);
}

std::atomic<bool> are_portable_alone{false};

bool may_use_hopper() { return current_device().major == kHopperMajor && !are_portable_alone; }

// The tile, or -1 where it is that, or where the code for 9.0a is missing.
int tile_with_code(int tile, const AttentionParams& params, bool (*of_half)(int, HopperBias),
                   bool (*of_bfloat16)(int, HopperBias)) {
  if (tile < 0) return -1;
  const auto is_there = params.query.type == DType::kFloat16 ? of_half : of_bfloat16;
  return is_there(tile, hopper_bias(params)) ? tile : -1;
}

// The tile of Hopper's forward, where that runs, or -1.
int hopper_forward(const AttentionParams& params) {
  const int tile = may_use_hopper() ? hopper_forward_tile(params) : -1;
  return tile_with_code(tile, params, attention_hopper_forward_is_there<__half>,
                        attention_hopper_forward_is_there<__nv_bfloat16>);
}

// The tile of Hopper's backward, where that runs, or -1.
int hopper_backward(const AttentionBackwardParams& params) {
  const int tile = may_use_hopper() ? hopper_backward_tile(params) : -1;
  return tile_with_code(tile, params, attention_hopper_backward_is_there<__half>,
                        attention_hopper_backward_is_there<__nv_bfloat16>);
}

}  // namespace

KeySplits attention_forward_splits(const AttentionParams& params, cudaStream_t stream) {
  const int tile = hopper_forward(params);
  const KeySplits splits = forward_splits(params, current_device(), tile);
  // Blocks that wait for each other need room at the same time; the driver takes a while to tell.
  return splits.count > 1 && is_decode(params, tile)
             ? forward_splits(params, device_at_hand(stream), tile)
             : splits;
}

bool attention_forward_finds_ranges(const AttentionForwardParams& params) {
  return hopper_forward(params) >= 0;
}

cudaError_t attention_forward(AttentionForwardParams params, cudaStream_t stream) {
  if (params.rows() == 0) return cudaSuccess;
  if (!is_valid(params)) return cudaErrorInvalidValue;
  const int tile = hopper_forward(params);
  return with_type(params, [&](auto of_type) -> cudaError_t {
    using T = decltype(of_type);
    if (tile < 0) {
      MEGASOFTMAX_RETURN_IF_ERROR(attention_forward_instance<T>(params, stream));
    } else if constexpr (sizeof(T) == 2) {
      MEGASOFTMAX_RETURN_IF_ERROR(attention_hopper_forward_instance<T>(params, tile, stream));
    }
    return params.parts == nullptr || is_decode(params, tile)
               ? cudaSuccess
               : attention_combine_instance<T>(params, stream);
  });
}

int attention_backward_keys(const AttentionBackwardParams& params) {
  const int tile = hopper_backward(params);
  return tile >= 0
             ? kAttentionHopperBackwardTiles[tile].keys()
             : kAttentionBackwardTiles[tile_for(kAttentionBackwardTiles, params, current_device())]
                   .keys();
}

QueryGradient attention_query_gradient_kind(const AttentionBackwardParams& params,
                                            bool is_deterministic) {
  return query_gradient_kind(params, hopper_backward(params), is_deterministic, current_device());
}

BiasGradient attention_shared_bias_gradient_kind(const AttentionBackwardParams& params,
                                                 bool is_deterministic) {
  const int tile = hopper_backward(params);
  if (tile >= 0 && sums_in_clusters(params)) return BiasGradient::kInClusters;
  return is_deterministic || is_faster_in_order(params, tile) ? BiasGradient::kInOrder
                                                              : BiasGradient::kShared;
}

int attention_bias_parts(const AttentionBackwardParams& params) {
  return bias_gradient_plan(params, current_device()).parts;
}

cudaError_t attention_backward(AttentionBackwardParams params, cudaStream_t stream) {
  if (params.batches == 0 || params.heads == 0) return cudaSuccess;
  if (!is_valid(params) || is_wide(params)) return cudaErrorInvalidValue;
  const int tile = hopper_backward(params);
  return with_type(params, [&](auto of_type) {
    return attention_backward_instance<decltype(of_type)>(params, tile, stream);
  });
}

}  // namespace megasoftmax

// For tests and benchmarks: kernels for one architecture alone are left out, or not.
extern "C" __attribute__((visibility("default"))) void megasoftmax_use_portable_attention(
    int is_alone) {
  megasoftmax::are_portable_alone = is_alone != 0;
}
