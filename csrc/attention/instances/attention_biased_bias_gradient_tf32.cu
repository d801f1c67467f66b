#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<Tf32, AttentionBackwardLauncher> registration("attention_biased_bias_gradient",
                                                                 launch_bias_gradient<Tf32>);
}  // namespace megasoftmax
