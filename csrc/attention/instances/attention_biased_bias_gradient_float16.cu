#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration("attention_biased_bias_gradient",
                                                                   launch_bias_gradient<__half>);
}  // namespace megasoftmax
