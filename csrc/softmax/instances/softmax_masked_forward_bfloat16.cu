#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, SoftmaxForwardLauncher> registration(
    "softmax_masked_forward", launch_softmax_masked_forward<__nv_bfloat16>);
}  // namespace megasoftmax
