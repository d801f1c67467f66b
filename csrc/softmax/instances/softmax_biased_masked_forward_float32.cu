#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxForwardLauncher> registration(
    "softmax_biased_masked_forward", launch_softmax_biased_masked_forward<float>);
}  // namespace megasoftmax
