#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_hopper_heads_backward", launch_heads_backward<__half>);
}  // namespace megasoftmax
