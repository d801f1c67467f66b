#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionForwardLauncher> registration(
    "attention_capped_forward", launch_tiles_forward<float, BiasKind::kSoftcap>);
}  // namespace megasoftmax
