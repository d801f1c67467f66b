#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionBackwardLauncher> registration(
    "attention_biased_backward", launch_tiles_backward<float, BiasKind::kAny>);
}  // namespace megasoftmax
