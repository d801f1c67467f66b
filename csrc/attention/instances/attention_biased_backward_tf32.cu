#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<Tf32, AttentionBackwardLauncher> registration(
    "attention_biased_backward", launch_tiles_backward<Tf32, BiasKind::kAny>);
}  // namespace megasoftmax
