// How attention would run. megasoftmax/explain/attention.py asks this of the compiled part, or of
// this file compiled without CUDA. It has the same members in the same order.

#include "plan.h"

namespace megasoftmax {

struct AttentionCall {
  int64_t batches, heads, key_heads, queries, keys, head_dim, value_dim;
  int64_t window_left, window_right;  // -1: no limit
  int64_t is_float, has_bias, has_float_bias, is_relative, is_backward;
  int64_t multiprocessors, major;  // of the device, and of its compute capability
  int64_t shared_bytes;            // of a block
};

struct AttentionExplanation {
  int64_t is_decode;                      // the kernel of few queries runs
  int64_t is_hopper;                      // kernels of sm90/ run, not the portable ones
  int64_t tile_head_dim, tile_value_dim;  // what those of queries and values are filled up to
  int64_t tile_queries, tile_keys;
  int64_t splits;  // of the keys among blocks, forward; a cluster adds the parts, or others do
  int64_t slices;  // of the columns of gradients, backward: blocks with the same keys
  int64_t threads, blocks;
  int64_t shared_bytes;  // of a block; 0 for Hopper's kernels, which are not chosen by it
  int64_t workspace_bytes;
};

namespace {

void explain_hopper_forward(const AttentionForwardParams& params, const AttentionHopperTile& tile,
                            int64_t multiprocessors, AttentionExplanation& found) {
  found.is_hopper = 1;
  found.tile_head_dim = tile.head_dim;
  found.tile_value_dim = tile.value_dim;
  found.tile_queries = tile.queries();
  found.tile_keys = tile.keys;
  found.threads = tile.threads();
  found.blocks = params.batches * hopper_blocks_of_heads(params, tile) * params.splits *
                 divide_up(params.queries, tile.queries());
  if (shares_blocks(params)) found.blocks = std::min(found.blocks, multiprocessors);
}

void explain_portable_forward(const AttentionForwardParams& params, const Device& device,
                              AttentionExplanation& found) {
  const AttentionTile& tile =
      kAttentionForwardTiles[tile_for(kAttentionForwardTiles, params, device)];
  found.tile_head_dim = found.tile_value_dim = tile.head_dim;
  found.is_decode = takes_few_queries(params);
  if (!found.is_decode) {
    found.tile_queries = tile.queries();
    found.tile_keys = tile.keys;
    found.threads = tile.threads();
    found.blocks =
        params.batches * params.heads * params.splits * divide_up(params.queries, tile.queries());
    const BiasKind kind = bias_kind(params);
    found.shared_bytes = ForwardLayout(tile, kind).bytes(bias_stages(tile, kind, device));
    return;
  }
  found.tile_queries = kMaxDecodeQueries;
  found.tile_keys = kDecodeKeys;
  found.threads = 32 * decode_warps(tile.head_dim);
  found.shared_bytes = DecodeLayout(tile.head_dim).bytes;
  found.blocks = params.batches * params.key_heads * params.splits * decode_row_tiles(params);
}

void explain_forward(AttentionForwardParams params, const Device& device,
                     AttentionExplanation& found) {
  const int tile = device.major == kHopperMajor ? hopper_forward_tile(params) : -1;
  const KeySplits splits = forward_splits(params, device, tile);
  params.splits = splits.count;
  found.splits = params.splits;
  found.slices = 1;
  if (splits.take_workspace)
    found.workspace_bytes = params.part_floats() * static_cast<int64_t>(sizeof(float));
  if (tile >= 0)
    explain_hopper_forward(params, kAttentionHopperTiles[tile], device.multiprocessors, found);
  else
    explain_portable_forward(params, device, found);
}

void explain_backward(const AttentionBackwardParams& params, int hopper_tile, const Device& device,
                      AttentionExplanation& found) {
  const auto explain_tile = [&](const auto& tile, int value_dim, int slices) {
    found.tile_head_dim = tile.head_dim;
    found.tile_value_dim = value_dim;
    found.tile_queries = tile.queries;
    found.tile_keys = tile.keys();
    found.slices = slices;
    found.threads = tile.threads();
  };
  if (hopper_tile >= 0) {
    found.is_hopper = 1;
    const AttentionHopperBackwardTile& tile = kAttentionHopperBackwardTiles[hopper_tile];
    explain_tile(tile, tile.value_dim, 1);
  } else {
    const AttentionBackwardTile& tile =
        kAttentionBackwardTiles[tile_for(kAttentionBackwardTiles, params, device)];
    explain_tile(tile, tile.head_dim, tile.head_dim / tile.slice);
    const BiasKind kind = bias_kind(params);
    found.shared_bytes = BackwardLayout(tile, kind).bytes(query_stages(tile, kind, device));
  }
  found.splits = 1;
  found.blocks = params.batches * params.key_heads *
                 divide_up<int64_t>(params.keys, found.tile_keys) * found.slices;
  const bool has_sums =
      query_gradient_kind(params, hopper_tile, false, device) != QueryGradient::kWhole;
  const int64_t bytes_of_row =
      static_cast<int64_t>(sizeof(RowOfBackward)) +
      (has_sums ? params.head_dim : 0) * static_cast<int64_t>(sizeof(float));
  found.workspace_bytes = params.rows() * bytes_of_row;
}

}  // namespace
}  // namespace megasoftmax

extern "C" __attribute__((visibility("default"))) void megasoftmax_explain_attention(
    const megasoftmax::AttentionCall* call, megasoftmax::AttentionExplanation* explanation) {
  using namespace megasoftmax;
  *explanation = {};
  AttentionBackwardParams params;
  params.batches = call->batches;
  params.heads = call->heads;
  params.key_heads = call->key_heads;
  params.queries = static_cast<int>(call->queries);
  params.keys = static_cast<int>(call->keys);
  params.head_dim = static_cast<int>(call->head_dim);
  params.value_dim = static_cast<int>(call->value_dim);
  params.heads_per_key_head = Divider(call->heads / call->key_heads);
  params.window_left = static_cast<int>(call->window_left);
  params.window_right = static_cast<int>(call->window_right);
  params.query = contiguous(call->heads, call->queries, call->head_dim);
  params.query.type = call->is_float != 0 ? DType::kFloat32 : DType::kFloat16;
  params.key = contiguous(call->key_heads, call->keys, call->head_dim);
  params.value = contiguous(call->key_heads, call->keys, call->value_dim);
  params.output_gradient = contiguous(call->heads, call->queries, call->value_dim);
  alignas(16) float given = 0;  // something that is there; its content plays no part
  params.batches_per_bias = Divider(call->batches);
  if (call->has_bias != 0) {
    // The bindings copy rows of other lengths to rows of these.
    params.bias = contiguous(call->heads, call->queries, round_up<int64_t>(call->keys, 8));
    params.bias.batch_stride = 0;
    params.bias.data = &given;
    params.bias.type = call->has_float_bias != 0 ? DType::kFloat32 : params.query.type;
    params.is_relative = call->is_relative != 0;
  }

  Device device;
  device.multiprocessors = static_cast<int>(call->multiprocessors);
  device.shared_bytes = static_cast<int>(call->shared_bytes);
  device.shared_bytes_per_sm = device.shared_bytes + kReservedSharedBytes;
  device.major = static_cast<int>(call->major);
  device.max_cluster = device.major >= kHopperMajor ? kPortableCluster : 1;
  if (call->is_backward != 0) {
    const int tile = device.major == kHopperMajor ? hopper_backward_tile(params) : -1;
    explain_backward(params, tile, device, *explanation);
    return;
  }
  AttentionForwardParams forward;
  static_cast<AttentionParams&>(forward) = params;
  explain_forward(forward, device, *explanation);
}
