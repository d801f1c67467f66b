#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxForwardLauncher> registration(
    "softmax_biased_forward", launch_softmax_biased_forward<__half>);
}  // namespace megasoftmax
