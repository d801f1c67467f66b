// How attention would run. megasoftmax/explain/attention.py asks this of the compiled part, or of
// this file compiled without CUDA.

#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

#include "backends.h"

namespace megasoftmax {
namespace {

using Fields = std::map<std::string, int64_t>;

Fields fields_of(const AttentionPlan& plan) {
  return {{"is_hopper", plan.backend == BackendId::kSm90 ? 1 : 0},
          {"tile_head_dim", plan.tile_head_dim},
          {"tile_value_dim", plan.tile_value_dim},
          {"tile_queries", plan.tile_queries},
          {"tile_keys", plan.tile_keys},
          {"threads", plan.threads},
          {"shared_bytes", plan.shared_bytes},
          {"blocks", plan.blocks},
          {"workspace_bytes", plan.workspace_bytes}};
}

Fields plan_of(const Fields& call) {
  const auto count = [&](const char* name) { return static_cast<int>(call.at(name)); };
  AttentionBackwardParams params;
  params.batches = call.at("batches");
  params.heads = call.at("heads");
  params.key_heads = call.at("key_heads");
  params.queries = count("queries");
  params.keys = count("keys");
  params.head_dim = count("head_dim");
  params.value_dim = count("value_dim");
  params.heads_per_key_head = Divider(params.heads / params.key_heads);
  params.window_left = count("window_left");
  params.window_right = count("window_right");
  params.query = contiguous(params.heads, params.queries, params.head_dim);
  params.query.type = call.at("is_float") != 0 ? DType::kFloat32 : DType::kFloat16;
  params.key = contiguous(params.key_heads, params.keys, params.head_dim);
  params.value = contiguous(params.key_heads, params.keys, params.value_dim);
  params.output_gradient = contiguous(params.heads, params.queries, params.value_dim);
  alignas(16) float given = 0;  // something that is there; its content plays no part
  params.batches_per_bias = Divider(params.batches);
  if (call.at("has_bias") != 0) {
    // The bindings copy rows of other lengths to rows of these.
    params.bias = contiguous(params.heads, params.queries, round_up<int64_t>(params.keys, 8));
    params.bias.batch_stride = 0;
    params.bias.data = &given;
    params.bias.type = call.at("has_float_bias") != 0 ? DType::kFloat32 : params.query.type;
    params.is_relative = call.at("is_relative") != 0;
    if (call.at("has_bias_gradient") != 0)
      params.bias_gradient_kind = bias_gradient_kind(params, params.queries, params.keys);
  }

  Device device;
  device.multiprocessors = count("multiprocessors");
  device.shared_bytes = count("shared_bytes");
  device.shared_bytes_per_sm = device.shared_bytes + kReservedSharedBytes;
  device.major = count("major");
  device.max_cluster = device.major >= kHopperMajor ? kPortableCluster : 1;
  const auto has_code = [](auto, int) { return true; };
  if (call.at("is_backward") != 0) {
    const BackwardPlan plan = backward_plan(params, false, device, has_code);
    Fields fields = fields_of(plan);
    fields.merge(Fields{{"splits", 1}, {"slices", plan.slices}, {"is_decode", 0}});
    return fields;
  }
  AttentionForwardParams forward;
  static_cast<AttentionParams&>(forward) = params;
  const ForwardPlan plan = forward_plan(forward, device, has_code);
  Fields fields = fields_of(plan);
  fields.merge(Fields{{"splits", plan.splits.count},
                      {"slices", 1},
                      {"is_decode", plan.kernel == ForwardKernel::kDecode ? 1 : 0}});
  return fields;
}

}  // namespace
}  // namespace megasoftmax

// The plan of a call; both are texts of names and integers, "name value name value". Null where a
// name of the call is missing. The text is there until the thread asks again.
extern "C" __attribute__((visibility("default"))) const char* megasoftmax_attention_plan(
    const char* call) {
  using namespace megasoftmax;
  thread_local std::string answer;
  Fields given;
  std::istringstream text(call);
  std::string name;
  for (int64_t value = 0; text >> name >> value;) given[name] = value;
  try {
    std::ostringstream found;
    for (const auto& [field, value] : plan_of(given)) found << field << ' ' << value << ' ';
    answer = found.str();
  } catch (const std::out_of_range&) {
    return nullptr;
  }
  return answer.c_str();
}
