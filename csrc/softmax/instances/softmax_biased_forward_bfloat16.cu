#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, SoftmaxForwardLauncher> registration(
    "softmax_biased_forward", launch_softmax_biased_forward<__nv_bfloat16>);
}  // namespace megasoftmax
