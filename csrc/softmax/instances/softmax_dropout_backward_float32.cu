#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxBackwardLauncher> registration(
    "softmax_dropout_backward", launch_softmax_dropout_backward<float>);
}  // namespace megasoftmax
