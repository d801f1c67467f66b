#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_biased_hopper_masked_backward",
    launch_hopper_backward<__half, HopperBias::kTile, HopperMask::kAny>);
}  // namespace megasoftmax
