#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_capped_hopper_backward",
    launch_hopper_backward<__half, HopperBias::kSoftcap, HopperMask::kNone, HopperMask::kAny>);
}  // namespace megasoftmax
