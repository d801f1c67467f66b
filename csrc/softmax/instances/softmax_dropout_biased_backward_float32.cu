#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxBackwardLauncher> registration(
    "softmax_dropout_biased_backward", launch_softmax_dropout_biased_backward<float>);
}  // namespace megasoftmax
