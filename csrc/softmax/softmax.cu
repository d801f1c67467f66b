// Prepares a launch, plans it, and selects the instance by element type.

#include <array>

#include "../common/device.h"
#include "instances/instances.h"
#include "softmax.h"

namespace megasoftmax {

namespace {
// Owners that keep a large GPU busy; fewer rows than that share a bias row's sum among several
// owners.
constexpr int64_t kEnoughOwners = 2048;

std::array<int, 2> forced_regimes = {-1, -1};  // forward, backward

// Whether a row without visible entries is 0.
template <class Params>
bool can_exclude(const Params& params) {
  return params.mask.data != nullptr || params.bias.data != nullptr || params.window.is_limited() ||
         params.visible.are_given() || params.sink.is_given;
}
}  // namespace

void prepare(ForwardParams& params) {
  params.rows = params.shape.rows();
  params.can_exclude = can_exclude(params);
  params.is_contiguous = is_contiguous(params.scores, params.shape);
  drop_idle_limits(params.window, params.shape);
  params.is_limited = params.window.is_limited() || params.visible.are_given();
  merge_dimensions(params.shape, params.window, params.visible, params.sink, params.dropout,
                   {&params.scores, &params.mask, &params.bias});
}

namespace {
// The same for a backward.
void prepare(BackwardParams& params) {
  params.is_contiguous = is_contiguous(params.gradient, params.shape) &&
                         is_contiguous(params.probabilities, params.shape);
  params.can_exclude = can_exclude(params);
  drop_idle_limits(params.window, params.shape);
  params.is_limited = params.window.is_limited() || params.visible.are_given();
  if (params.bias_gradient == nullptr) {
    merge_dimensions(params.shape, params.window, params.visible, params.sink, params.dropout,
                     {&params.gradient, &params.probabilities, &params.mask, &params.bias});
    params.bias_shape = params.shape;
    return;
  }
  const Shape &shape = params.shape, &bias = params.bias_shape;
  const Shape shared{shape.batches / bias.batches, shape.heads / bias.heads,
                     shape.queries / bias.queries, 0};
  params.shared_by_queries = Divider(shared.queries);
  params.shared_by_heads = Divider(shared.heads);
  params.rows_per_owner = shared.rows();
  params.rows_per_split = divide_up(shared.rows(), params.splits);
}

Plan plan_at_hand(const ForwardParams& params, cudaStream_t stream) {
  return plan_for(stream, [&](const Device& device) {
    return plan_forward(params, device, forced_regimes[0]);
  });
}
Plan plan_at_hand(const BackwardParams& params, cudaStream_t stream) {
  return plan_for(stream, [&](const Device& device) {
    return plan_backward(params, device, forced_regimes[1]);
  });
}
}  // namespace

cudaError_t softmax_forward(ForwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0) return cudaSuccess;
  if (!fits_indices(params.shape, params.window)) return cudaErrorInvalidValue;
  prepare(params);
  Plan plan = plan_at_hand(params, stream);
  plan.schedule.results = params.workspace;
  return with_dtype(params.scores.type, [&](auto tag) {
    using T = decltype(tag);
    const bool is_biased = params.bias.data != nullptr, is_masked = params.mask.data != nullptr;
    const auto launch = params.dropout.is_given() ? softmax_dropout_forward_instance<T>
                        : is_biased && is_masked  ? softmax_masked_biased_forward_instance<T>
                        : is_biased               ? softmax_biased_forward_instance<T>
                        : is_masked               ? softmax_masked_forward_instance<T>
                                                  : softmax_forward_instance<T>;
    return launch(params, plan, stream);
  });
}

cudaError_t softmax_backward(BackwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0 &&
      (params.bias_gradient == nullptr || params.bias_shape.rows() == 0))
    return cudaSuccess;
  if (!fits_indices(params.shape, params.window)) return cudaErrorInvalidValue;
  prepare(params);
  Plan plan = plan_at_hand(params, stream);
  plan.schedule.results = params.workspace;
  return with_dtype(params.probabilities.type, [&](auto tag) {
    using T = decltype(tag);
    const auto launch = !params.dropout.is_given()    ? softmax_backward_instance<T>
                        : params.bias.data != nullptr ? softmax_biased_dropout_backward_instance<T>
                                                      : softmax_dropout_backward_instance<T>;
    return launch(params, plan, stream);
  });
}

int64_t softmax_forward_workspace(ForwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0) return 0;
  prepare(params);
  return plan_at_hand(params, stream).workspace_bytes;
}

int64_t softmax_backward_workspace(BackwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0 || params.bias_gradient != nullptr) return 0;
  prepare(params);
  return plan_at_hand(params, stream).workspace_bytes;
}

void force_regimes(int forward, int backward) { forced_regimes = {forward, backward}; }

BiasGradientPlan plan_bias_gradient(const Shape& shape, const Shape& bias_shape,
                                    DType probabilities_type, const Dropout& dropout) {
  const int64_t owners = std::max<int64_t>(bias_shape.rows(), 1);
  const int64_t rows_per_owner = shape.rows() / owners;
  const int pack_elements = 16 / size_of(probabilities_type);
  const int64_t chunks = divide_up<int64_t>(shape.columns, pack_elements);
  BiasGradientPlan plan;
  const int64_t splits = std::clamp<int64_t>(divide_up(kEnoughOwners, owners), 1,
                                             std::max<int64_t>(rows_per_owner, 1));
  // Equal parts, none of them empty.
  const int64_t rows_per_split = std::max<int64_t>(divide_up(rows_per_owner, splits), 1);
  plan.splits = std::max<int64_t>(divide_up(rows_per_owner, rows_per_split), 1);
  plan.accumulates =
      kBackwardRegimes[regime_for(kBackwardRegimes, chunks, owners, kind_of_bias_gradient(dropout),
                                  2 * 16, current_device())]
          .storage != Storage::kRegisters;
  return plan;
}

}  // namespace megasoftmax
