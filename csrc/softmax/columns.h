#pragma once
// Softmax over a dimension that is not the last: of tensors seen as [outer, length, inner], over
// `length`. The formulas are those of forward.cuh and backward.cuh with nothing but a scale. Entry
// points launch on `stream`, allocate nothing and never synchronise.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/dtype.h"

namespace megasoftmax {

struct ColumnsShape {
  int64_t outer = 0, length = 0, inner = 0;
};

// All tensors are contiguous, and written ones 16-byte aligned.
struct ColumnsForwardParams {
  ColumnsShape shape;
  const void* scores = nullptr;
  DType scores_type = DType::kFloat32;
  float scale = 1;

  void* probabilities = nullptr;
  DType probabilities_type = DType::kFloat32;
  float* log_sum_exp = nullptr;  // [outer, inner], or null
};

struct ColumnsBackwardParams {
  ColumnsShape shape;
  const void *gradient = nullptr, *probabilities = nullptr;
  DType probabilities_type = DType::kFloat32;   // of both
  const float* log_sum_exp_gradient = nullptr;  // [outer, inner], or null
  float scale = 1;

  void* scores_gradient = nullptr;
  DType scores_gradient_type = DType::kFloat32;
};

// Types of launchers, see common/kernels.h.
using ColumnsForwardLauncher = cudaError_t(const ColumnsForwardParams&, cudaStream_t);
using ColumnsBackwardLauncher = cudaError_t(const ColumnsBackwardParams&, cudaStream_t);

cudaError_t softmax_columns_forward(const ColumnsForwardParams& params, cudaStream_t stream);
cudaError_t softmax_columns_backward(const ColumnsBackwardParams& params, cudaStream_t stream);

inline constexpr int kColumnsThreads = 256;
// The fewest of a tile: 64 or 128 bytes of a row. At 1024 rows half as many take 30% longer in
// bfloat16 and 6% in float32, twice as many 5% and 3%.
inline constexpr int kColumnsMinColumns = 32;
// Shared memory of a block: three fit a multiprocessor, so that one loads while others compute and
// store. Half of it takes 30% longer at 1024 rows of bfloat16, half as much again 15%. A tile that
// is too long even for the largest cluster takes all there is.
inline constexpr int kColumnsBlockBytes = 72 * 1024;
inline constexpr int kColumnsMaxCluster = 8;
// Blocks that registers leave room for: a fourth serves short columns (64 rows: -7% time), and
// makes the backward pass spill.
inline constexpr int kColumnsForwardBlocks = 4, kColumnsBackwardBlocks = 3;

// How a launch is cut. It depends on length, inner and alignment alone, so that a result does not
// depend on how many others a call has.
struct ColumnsPolicy {
  int lanes = kColumnsThreads;  // strips of a tile, side by side along inner
  int blocks = 1;               // in a cluster, which share the length of a tile
  int kept_strips = 0;          // of a thread and input, in shared memory; others are read twice

  // Sums of a block that wait for each other: of warps, or of threads where a row takes more.
  __host__ __device__ constexpr int parts() const {
    return kColumnsThreads / (lanes < 32 ? 32 : lanes);
  }
  __host__ __device__ constexpr bool has_owners() const {  // threads that own whole columns
    return lanes == kColumnsThreads && blocks == 1;
  }
  constexpr int sum_bytes(int strip_elements) const {
    return has_owners() ? 0 : (parts() + (blocks > 1 ? blocks : 0)) * lanes * strip_elements * 8;
  }
};

// Strips that a thread takes at a time.
constexpr int columns_batch(int strip_bytes) { return strip_bytes < 8 ? 32 / strip_bytes : 4; }

// Strips are what a thread reads of a row and input at once; it takes `batch` of them at a time.
constexpr ColumnsPolicy columns_policy(const ColumnsShape& shape, int strip_elements,
                                       int strip_bytes, int inputs, int batch, bool has_clusters,
                                       int max_block_bytes) {
  ColumnsPolicy policy;
  const int wanted_bytes =
      kColumnsBlockBytes < max_block_bytes ? kColumnsBlockBytes : max_block_bytes;
  const auto is_too_long = [&] {
    const int64_t room = wanted_bytes - policy.sum_bytes(strip_elements);
    return shape.length * policy.lanes * strip_bytes * inputs > room * policy.blocks;
  };
  while (policy.lanes * strip_elements > kColumnsMinColumns && is_too_long()) policy.lanes /= 2;
  while (policy.lanes * strip_elements >= 2 * shape.inner && is_too_long()) policy.lanes /= 2;
  while (has_clusters && policy.blocks < kColumnsMaxCluster && is_too_long()) policy.blocks *= 2;

  const int64_t rows_at_a_time = kColumnsThreads / policy.lanes * policy.blocks * batch;
  const int64_t batches = (shape.length + rows_at_a_time - 1) / rows_at_a_time;
  const int block_bytes = is_too_long() ? max_block_bytes : wanted_bytes;
  const int64_t room = (block_bytes - policy.sum_bytes(strip_elements)) /
                       (kColumnsThreads * strip_bytes * inputs * batch);
  policy.kept_strips = static_cast<int>(batches < room ? batches : room) * batch;
  return policy;
}

}  // namespace megasoftmax
