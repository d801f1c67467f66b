#pragma once
// Entry points of attention. They launch on `stream`, allocate nothing and never synchronise.

#include <cuda_runtime_api.h>

#include "params.h"

namespace megasoftmax {

// Makes params.note, of which `batches` and `heads` have words of their own: all, or one. What the
// backward alone reads is not written unless it `is_for_backward`.
cudaError_t attention_note(const AttentionParams& params, int batches, int heads,
                           bool is_for_backward, cudaStream_t stream);

// Into how many parts the forward wants the keys split, and whether it needs the workspace for
// them.
KeySplits attention_forward_splits(const AttentionParams& params, cudaStream_t stream);

// Whether the forward needs no note of ranges without a mask, and takes `tiles_taken` where a mask
// or ranges are given.
bool attention_forward_finds_ranges(const AttentionForwardParams& params);

// The type of the queries selects the instance.
cudaError_t attention_forward(AttentionForwardParams params, cudaStream_t stream);

// How many keys a block of the backward has, which gives the size of sums along diagonals.
int attention_backward_keys(const AttentionBackwardParams& params);
// How gradients of queries are summed, which tells the workspace.
QueryGradient attention_query_gradient_kind(const AttentionBackwardParams& params,
                                            bool is_deterministic);
// What kShared shall be, which depends on the former, and into how many parts kInOrder is cut.
BiasGradient attention_shared_bias_gradient_kind(const AttentionBackwardParams& params,
                                                 bool is_deterministic);
int attention_bias_parts(const AttentionBackwardParams& params);
cudaError_t attention_backward(AttentionBackwardParams params, cudaStream_t stream);

}  // namespace megasoftmax
