// How attention would run. megasoftmax/explain/attention.py asks this of the compiled part, or of
// this file compiled without CUDA. It has the same members in the same order.

#include "plan.h"

namespace megasoftmax {

struct AttentionCall {
  int64_t batches, heads, key_heads, queries, keys, head_dim, value_dim;
  int64_t is_backward;
  int64_t multiprocessors;  // of the device
};

struct AttentionExplanation {
  int64_t is_decode;      // few queries: blocks split the keys, and a second launch adds the parts
  int64_t tile_head_dim;  // what head dimensions are filled up to
  int64_t tile_queries, tile_keys;
  int64_t splits;  // of the keys, in decoding
  int64_t slices;  // of the columns of gradients, backward: blocks with the same keys
  int64_t threads, blocks;
  int64_t workspace_bytes;
};

namespace {

void explain_forward(const AttentionParams& params, int splits, AttentionExplanation& found) {
  const AttentionTile& tile = kAttentionForwardTiles[tile_for(kAttentionForwardTiles, params)];
  found.tile_head_dim = tile.head_dim;
  found.is_decode = splits > 0;
  found.splits = found.slices = 1;
  if (splits == 0) {
    found.tile_queries = tile.queries();
    found.tile_keys = tile.keys;
    found.threads = tile.threads();
    found.blocks = params.batches * params.heads * divide_up(params.queries, tile.queries());
    return;
  }
  found.tile_queries = kMaxDecodeQueries;
  found.tile_keys = kDecodeKeys;
  found.splits = splits;
  found.threads = 32 * decode_warps(tile.head_dim);
  const int64_t rows = params.heads_per_key_head.divisor * params.queries;
  found.blocks =
      params.batches * params.key_heads * splits * divide_up<int64_t>(rows, kMaxDecodeQueries);
  const int64_t bytes_of_part = (params.value_dim + 2) * static_cast<int64_t>(sizeof(float));
  found.workspace_bytes = splits * params.rows() * bytes_of_part;
}

void explain_backward(const AttentionParams& params, AttentionExplanation& found) {
  const AttentionBackwardTile& tile =
      kAttentionBackwardTiles[tile_for(kAttentionBackwardTiles, params)];
  found.tile_head_dim = tile.head_dim;
  found.tile_queries = tile.queries;
  found.tile_keys = tile.keys();
  found.splits = 1;
  found.slices = tile.head_dim / tile.slice;
  found.threads = tile.threads();
  found.blocks =
      params.batches * params.key_heads * divide_up(params.keys, tile.keys()) * found.slices;
  const int64_t bytes_of_row = static_cast<int64_t>(sizeof(RowOfBackward)) +
                               params.head_dim * static_cast<int64_t>(sizeof(float));
  found.workspace_bytes = params.rows() * bytes_of_row;
}

}  // namespace
}  // namespace megasoftmax

extern "C" __attribute__((visibility("default"))) void megasoftmax_explain_attention(
    const megasoftmax::AttentionCall* call, megasoftmax::AttentionExplanation* explanation) {
  using namespace megasoftmax;
  *explanation = {};
  AttentionParams params;
  params.batches = call->batches;
  params.heads = call->heads;
  params.key_heads = call->key_heads;
  params.queries = static_cast<int>(call->queries);
  params.keys = static_cast<int>(call->keys);
  params.head_dim = static_cast<int>(call->head_dim);
  params.value_dim = static_cast<int>(call->value_dim);
  params.heads_per_key_head = Divider(call->heads / call->key_heads);
  if (call->is_backward != 0)
    explain_backward(params, *explanation);
  else
    explain_forward(params, forward_splits(params, static_cast<int>(call->multiprocessors)),
                    *explanation);
}
