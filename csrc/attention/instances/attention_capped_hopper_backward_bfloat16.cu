#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_capped_hopper_backward",
    launch_hopper_backward<__nv_bfloat16, HopperBias::kSoftcap, HopperMask::kNone,
                           HopperMask::kAny>);
}  // namespace megasoftmax
