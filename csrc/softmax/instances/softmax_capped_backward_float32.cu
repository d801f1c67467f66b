#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxBackwardLauncher> registration(
    "softmax_capped_backward", launch_softmax_capped_backward<float>);
}  // namespace megasoftmax
