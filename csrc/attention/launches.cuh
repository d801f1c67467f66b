#pragma once
// Launches of grids over tiles, for the dispatch of all backends.

#include "../common/device.h"
#include "../common/launch.cuh"
#include "plan.h"

namespace megasoftmax {

// Calls body.operator()<kind>() if `kind` is one of kKinds, else returns cudaErrorInvalidValue.
template <auto... kKinds, class Kind, class Body>
cudaError_t with_one_of(Kind kind, Body&& body) {
  cudaError_t error = cudaErrorInvalidValue;
  static_cast<void>(
      ((kind == kKinds && (error = body.template operator()<kKinds>(), true)) || ...));
  return error;
}

// Launches so many blocks for each head and batch. With more than one split, x is the split and y
// such a block.
template <class Params>
cudaError_t launch_tiles(void (*kernel)(Params), int64_t tiles, int64_t heads, int64_t batches,
                         int threads, int shared_bytes, cudaStream_t stream, Params params,
                         int splits = 1, Together together = Together::kNot) {
  const int64_t blocks = tiles * heads * batches;
  if (blocks == 0) return cudaSuccess;
  if (blocks > (splits == 1 ? INT32_MAX : UINT16_MAX)) return cudaErrorInvalidValue;
  params.order = TileOrder(tiles, batches,
                           heads_of_section(params, heads, batches, bytes_of_head(params),
                                            current_device().cache_bytes));
  const auto count = static_cast<unsigned>(blocks);
  return launch(kernel, splits == 1 ? dim3(count) : dim3(static_cast<unsigned>(splits), count),
                dim3(static_cast<unsigned>(threads)), shared_bytes, together, splits, stream,
                params);
}

// For kernels that call wait_for_launch_before. Hopper's always overlap.
inline Together overlapping() {
  return may_overlap(current_device()) ? Together::kOverlapping : Together::kNot;
}

// Launches a thread for each of `count` items.
template <class Params>
cudaError_t launch_flat(void (*kernel)(Params), int64_t count, int threads, cudaStream_t stream,
                        const Params& params, Together together = Together::kNot) {
  if (count <= 0) return cudaSuccess;
  const int64_t blocks = divide_up<int64_t>(count, threads);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                0, together, 1, stream, params);
}

}  // namespace megasoftmax
