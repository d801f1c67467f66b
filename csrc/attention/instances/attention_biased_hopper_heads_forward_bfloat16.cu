#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionForwardLauncher> registration(
    "attention_biased_hopper_heads_forward", launch_heads_forward<__nv_bfloat16>);
}  // namespace megasoftmax
