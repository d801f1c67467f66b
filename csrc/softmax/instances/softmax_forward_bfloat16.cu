#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, SoftmaxForwardLauncher> registration(
    "softmax_forward", launch_softmax_forward<__nv_bfloat16>);
}  // namespace megasoftmax
