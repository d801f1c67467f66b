// How attention would run. megasoftmax/explain/attention.py asks this of the compiled part, or of
// this file compiled without CUDA.

#include "../common/named.h"
#include "backends.h"

namespace megasoftmax {
namespace {

template <class Add>
void add_fields(const AttentionPlan& plan, Add&& add) {
  add("is_hopper", plan.backend == BackendId::kSm90 ? 1 : 0);
  add("tile_head_dim", plan.tile_head_dim);
  add("tile_value_dim", plan.tile_value_dim);
  add("tile_queries", plan.tile_queries);
  add("tile_keys", plan.tile_keys);
  add("threads", plan.threads);
  add("shared_bytes", plan.shared_bytes);
  add("blocks", plan.blocks);
  add("workspace_bytes", plan.workspace_bytes);
}

template <class Add>
void add_plan(const NamedIntegers& call, Add&& add) {
  const auto count = [&](const char* name) { return static_cast<int>(call[name]); };
  AttentionBackwardParams params;
  params.batches = call["batches"];
  params.heads = call["heads"];
  params.key_heads = call["key_heads"];
  params.queries = count("queries");
  params.keys = count("keys");
  params.head_dim = count("head_dim");
  params.value_dim = count("value_dim");
  params.heads_per_key_head = Divider(params.heads / params.key_heads);
  params.window_left = count("window_left");
  params.window_right = count("window_right");
  params.query = contiguous(params.heads, params.queries, params.head_dim);
  params.query.type = call["is_float"] != 0 ? DType::kFloat32 : DType::kFloat16;
  params.key = contiguous(params.key_heads, params.keys, params.head_dim);
  params.value = contiguous(params.key_heads, params.keys, params.value_dim);
  params.output = params.output_gradient =
      contiguous(params.heads, params.queries, params.value_dim);
  alignas(16) float given = 0;  // something that is there; its content plays no part
  params.batches_per_bias = Divider(params.batches);
  if (call["has_bias"] == 0) params.heads_per_bias = Divider(params.heads);
  LogitOptions options;
  if (call["has_softcap"] != 0) options.softcap = Softcap(1, 1);
  params.set_logits(options);
  if (call["has_mask"] != 0) {
    static uint32_t words = 0;
    params.mask.data = &given;
    params.block_mask.words = &words;
  }
  if (call["has_bias"] != 0) {
    const bool is_of_keys = call["is_of_keys"] != 0, is_shifted = call["is_shifted"] != 0;
    const int distances = params.queries + params.keys - 1;
    params.bias = contiguous(params.heads, is_of_keys ? 1 : params.queries,
                             is_shifted ? distances : params.keys);
    int64_t entries = params.heads * params.bias.head_stride;
    if (is_shifted) {  // the last query begins with the first of its scores
      params.batches_per_bias = Divider(1);
      params.bias.query_stride = distances - 1;
      entries *= params.batches;
    } else {
      params.bias.batch_stride = 0;
    }
    if (is_of_keys) params.bias.query_stride = 0;
    params.bias.data = &given;
    params.bias.type = call["has_float_bias"] != 0 ? DType::kFloat32 : params.query.type;
    params.bias.last_whole_row =
        reinterpret_cast<uintptr_t>(&given) + size_of(params.bias.type) * entries;
    params.is_relative = call["is_relative"] != 0;
    if (params.is_relative) params.bias.query_stride = -1;  // entries follow key - query
    if (call["has_bias_gradient"] != 0)
      params.bias_gradient_kind =
          bias_gradient_kind(params, is_of_keys ? 1 : params.queries, params.keys);
  }

  Device device;
  device.multiprocessors = count("multiprocessors");
  device.shared_bytes = count("shared_bytes");
  device.shared_bytes_per_sm = device.shared_bytes + kReservedSharedBytes;
  device.major = count("major");
  device.max_cluster = device.major >= kHopperMajor ? kPortableCluster : 1;
  const auto has_code = [](auto) { return true; };
  // Plans again with the rows that the bindings copy a bias to, if they do.
  const auto planned = [&](auto&& params, auto&& make_plan) {
    auto plan = make_plan();
    const int64_t pitch = round_up<int64_t>(params.keys, 16 / size_of(params.bias.type));
    const bool copies = params.bias.data != nullptr && !params.is_relative &&
                        !is_shared_by_queries(params) && !plan.reads_bias_in_place &&
                        params.bias.query_stride != pitch;
    add("copies_bias", copies ? 1 : 0);
    if (!copies) return plan;
    params.bias.query_stride = pitch;
    params.bias.head_stride = params.queries * pitch;
    return make_plan();
  };
  if (call["is_backward"] != 0) {
    const bool is_deterministic = call["is_deterministic"] != 0;
    const BackwardPlan plan =
        planned(params, [&] { return backward_plan(params, is_deterministic, device, has_code); });
    add_fields(plan, add);
    add("query_sums", plan.query_sums);
    add("takes_turns", plan.query_gradient == QueryGradient::kInTurns ? 1 : 0);
    add("first_keys_first", plan.order_of_turns == OrderOfTurns::kFirstKeysFirst ? 1 : 0);
    add("queries_in_order", plan.query_gradient == QueryGradient::kInOrder ? 1 : 0);
    add("has_row_workers", plan.sections_apart != 0 ? 1 : 0);
    add("bias_in_order", plan.bias_gradient == BiasGradient::kInOrder ? 1 : 0);
    add("splits", 1);
    add("slices", plan.slices);
    add("is_decode", 0);
    add("is_small", plan.kernel == BackwardKernel::kSmall ? 1 : 0);
    add("takes_heads", plan.kernel == BackwardKernel::kHeads ? 1 : 0);
    return;
  }
  AttentionForwardParams forward;
  static_cast<AttentionParams&>(forward) = params;
  const ForwardPlan plan =
      planned(forward, [&] { return forward_plan(forward, device, has_code); });
  add_fields(plan, add);
  add("splits", plan.splits.count);
  add("slices", 1);
  add("is_decode", plan.kernel == ForwardKernel::kDecode ? 1 : 0);
  add("is_small", plan.kernel == ForwardKernel::kSmall ? 1 : 0);
  add("takes_heads", plan.kernel == ForwardKernel::kHeads ? 1 : 0);
}

}  // namespace
}  // namespace megasoftmax

// `text`: the numbers that megasoftmax/explain/attention.py names. Returns lines as `add_plan` adds
// them.
extern "C" __attribute__((visibility("default"))) const char* megasoftmax_attention_plan(
    const char* text) {
  using namespace megasoftmax;
  const NamedIntegers call(text);
  return named_lines([&](auto&& add) { add_plan(call, add); });
}
