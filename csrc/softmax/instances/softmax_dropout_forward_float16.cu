#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxForwardLauncher> registration(
    "softmax_dropout_forward", launch_softmax_dropout_forward<__half>);
}  // namespace megasoftmax
