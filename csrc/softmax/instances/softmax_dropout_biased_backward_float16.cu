#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxBackwardLauncher> registration(
    "softmax_dropout_biased_backward", launch_softmax_dropout_biased_backward<__half>);
}  // namespace megasoftmax
