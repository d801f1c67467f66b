#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionForwardLauncher> registration(
    "attention_biased_hopper_heads_forward", launch_heads_forward<__half>);
}  // namespace megasoftmax
