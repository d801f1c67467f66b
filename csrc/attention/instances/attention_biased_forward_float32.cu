#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionForwardLauncher> registration(
    "attention_biased_forward", launch_tiles_forward<float, BiasKind::kAny>);
}  // namespace megasoftmax
