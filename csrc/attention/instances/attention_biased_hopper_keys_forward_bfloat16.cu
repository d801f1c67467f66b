#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionForwardLauncher> registration(
    "attention_biased_hopper_keys_forward",
    launch_hopper_forward<__nv_bfloat16, HopperBias::kKeys>);
}  // namespace megasoftmax
