#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, TopkBackwardLauncher> registration(
    "topk_backward", launch_topk_backward<__nv_bfloat16>);
}  // namespace megasoftmax
