#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_hopper_backward",
    launch_hopper_backward<__half, HopperBias::kNone, HopperMask::kNone, HopperMask::kKeys,
                           HopperMask::kAny>);
}  // namespace megasoftmax
