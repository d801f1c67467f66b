#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxBackwardLauncher> registration(
    "softmax_dropout_backward", launch_softmax_dropout_backward<__half>);
}  // namespace megasoftmax
