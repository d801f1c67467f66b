#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, SoftmaxBackwardLauncher> registration(
    "softmax_dropout_biased_backward", launch_softmax_dropout_biased_backward<__nv_bfloat16>);
}  // namespace megasoftmax
