#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxForwardLauncher> registration(
    "softmax_capped_forward", launch_softmax_capped_forward<__half>);
}  // namespace megasoftmax
