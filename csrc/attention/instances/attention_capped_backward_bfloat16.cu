#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_capped_backward", launch_tiles_backward<__nv_bfloat16, BiasKind::kSoftcap>);
}  // namespace megasoftmax
