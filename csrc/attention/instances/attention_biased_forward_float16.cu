#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionForwardLauncher> registration(
    "attention_biased_forward", launch_tiles_forward<__half, BiasKind::kTile, BiasKind::kAny>);
}  // namespace megasoftmax
