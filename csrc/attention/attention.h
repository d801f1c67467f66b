#pragma once
// Entry points of attention. They launch on `stream`, allocate nothing and never synchronise.

#include <cuda_runtime_api.h>

#include "plan.h"

namespace megasoftmax {

// Makes params.block_mask, of which `batches` and `heads` have words of their own: all, or one.
// What the backward alone reads is not written unless it `is_for_backward`.
cudaError_t attention_block_mask(const AttentionParams& params, int batches, int heads,
                                 bool is_for_backward, cudaStream_t stream);

// Copies 16-bit rows [batches, heads, queries, columns], dense along the columns, to contiguous
// rows of as many elements as 16 bytes fill. What follows the columns becomes 0.
cudaError_t attention_align_rows(const Strided& rows, int64_t batches, int64_t heads,
                                 int64_t queries, int columns, void* aligned, cudaStream_t stream);

// Writes the gradient of a shifted bias from that of its pairs, whose rows are aligned: of the
// table [batches, heads, queries, distances], where pair (i, j) has entry j - i + queries - 1 of
// row i. The other entries become 0. Rows of a head lie together, so that query_stride is the
// distances.
cudaError_t attention_unshift_rows(const Strided& pairs, const Strided& table, int64_t batches,
                                   int64_t heads, int queries, int keys, cudaStream_t stream);

// Output and statistics of queries over some keys, [batches, heads, queries, columns] and without
// columns, and those over others. The column stride of statistics leads from one to the next.
struct MergeParams {
  Strided output, statistics, other_output, other_statistics;
  Divider queries, heads;
  int64_t rows = 0;
  int columns = 0;
};
// Output and statistics become those over the keys of both. The output may be float32.
cudaError_t attention_merge(const MergeParams& params, cudaStream_t stream);

// Whether Hopper's kernels were compiled for this GPU.
bool has_hopper_code();

// Types of launchers, see common/kernels.h.
using AttentionForwardLauncher = cudaError_t(const ForwardLaunch&, cudaStream_t);
using AttentionBackwardLauncher = cudaError_t(const BackwardLaunch&, cudaStream_t);

// A launch is planned once. The plan tells the workspace, which the caller gives by
// `launch.set_workspace`, and whether a block mask of ranges is read. The layout of
// params.block_mask is set before, and its words may be set later.
ForwardLaunch plan_attention_forward(const AttentionForwardParams& params, cudaStream_t stream);
// params.block_mask is set, and params.bias_gradient_kind as the sizes of the bias ask. The plan
// decides how it is made.
BackwardLaunch plan_attention_backward(const AttentionBackwardParams& params,
                                       bool is_deterministic);

// The type of the queries selects the kernels.
cudaError_t attention_forward(const ForwardLaunch& launch, cudaStream_t stream);
cudaError_t attention_backward(const BackwardLaunch& launch, cudaStream_t stream);

}  // namespace megasoftmax
