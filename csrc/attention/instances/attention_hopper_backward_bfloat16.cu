#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_hopper_backward",
    launch_hopper_backward<__nv_bfloat16, HopperBias::kNone, HopperMask::kNone, HopperMask::kKeys,
                           HopperMask::kAny>);
}  // namespace megasoftmax
