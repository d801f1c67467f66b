#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxForwardLauncher> registration(
    "softmax_capped_forward", launch_softmax_capped_forward<float>);
}  // namespace megasoftmax
