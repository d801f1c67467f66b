#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxForwardLauncher> registration(
    "softmax_masked_forward", launch_softmax_masked_forward<float>);
}  // namespace megasoftmax
