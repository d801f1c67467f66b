#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_capped_backward", launch_tiles_backward<__half, BiasKind::kSoftcap>);
}  // namespace megasoftmax
