#pragma once
// The backends of attention: a folder of kernels for some GPUs, with a plan.h. DESIGN.md says how
// to add one. Plain host code.

#include "sm80/plan.h"
#include "sm90/plan.h"

namespace megasoftmax {

// The plan of the first backend that takes a launch. `has_code(backend)`: whether its kernels were
// compiled for this GPU.
template <class HasCode>
ForwardPlan forward_plan(const AttentionForwardParams& params, const Device& device,
                         HasCode&& has_code) {
  const auto found = Sm90::plan(params, device, [&] { return has_code(Sm90{}); });
  return found ? *found : Sm80::plan(params, device);
}
template <class HasCode>
BackwardPlan backward_plan(const AttentionBackwardParams& params, bool is_deterministic,
                           const Device& device, HasCode&& has_code) {
  const auto found = Sm90::plan(params, is_deterministic, device, [&] { return has_code(Sm90{}); });
  return found ? *found : Sm80::plan(params, is_deterministic, device);
}

}  // namespace megasoftmax
