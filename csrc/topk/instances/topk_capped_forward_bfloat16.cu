#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, TopkForwardLauncher> registration(
    "topk_capped_forward", launch_topk_capped_forward<__nv_bfloat16>);
}  // namespace megasoftmax
