#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionBackwardLauncher> registration(
    "attention_capped_backward", launch_tiles_backward<float, BiasKind::kSoftcap>);
}  // namespace megasoftmax
