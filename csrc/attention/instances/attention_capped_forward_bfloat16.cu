#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionForwardLauncher> registration(
    "attention_capped_forward", launch_tiles_forward<__nv_bfloat16, BiasKind::kSoftcap>);
}  // namespace megasoftmax
