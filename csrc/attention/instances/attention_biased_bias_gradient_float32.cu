#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionBackwardLauncher> registration("attention_biased_bias_gradient",
                                                                  launch_bias_gradient<float>);
}  // namespace megasoftmax
