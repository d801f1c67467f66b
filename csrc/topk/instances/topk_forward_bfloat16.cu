#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, TopkForwardLauncher> registration(
    "topk_forward", launch_topk_forward<__nv_bfloat16>);
}  // namespace megasoftmax
