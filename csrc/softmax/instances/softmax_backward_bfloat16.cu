#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, SoftmaxBackwardLauncher> registration(
    "softmax_backward", launch_softmax_backward<__nv_bfloat16>);
}  // namespace megasoftmax
