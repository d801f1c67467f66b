#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_biased_hopper_bias_gradient", launch_hopper_bias_gradient<__half>);
}  // namespace megasoftmax
