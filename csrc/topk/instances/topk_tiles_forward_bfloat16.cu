#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, TopkForwardLauncher> registration(
    "topk_tiles_forward", launch_topk_tiles_forward<__nv_bfloat16>);
}  // namespace megasoftmax
