#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxBackwardLauncher> registration(
    "softmax_capped_backward", launch_softmax_capped_backward<__half>);
}  // namespace megasoftmax
