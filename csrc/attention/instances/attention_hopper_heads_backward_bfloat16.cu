#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_hopper_heads_backward", launch_heads_backward<__nv_bfloat16>);
}  // namespace megasoftmax
