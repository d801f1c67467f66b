#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_biased_backward", launch_tiles_backward<__half, BiasKind::kAny>);
}  // namespace megasoftmax
