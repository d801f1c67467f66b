#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_biased_hopper_bias_gradient", launch_hopper_bias_gradient<__nv_bfloat16>);
}  // namespace megasoftmax
