#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_biased_hopper_keys_backward",
    launch_hopper_backward<__half, HopperBias::kKeys, HopperMask::kKeys>);
}  // namespace megasoftmax
