#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionForwardLauncher> registration(
    "attention_biased_hopper_keys_forward", launch_hopper_forward<__half, HopperBias::kKeys>);
}  // namespace megasoftmax
