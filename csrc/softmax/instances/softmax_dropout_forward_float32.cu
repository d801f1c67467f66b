#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxForwardLauncher> registration(
    "softmax_dropout_forward", launch_softmax_dropout_forward<float>);
}  // namespace megasoftmax
