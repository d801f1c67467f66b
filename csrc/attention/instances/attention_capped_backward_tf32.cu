#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<Tf32, AttentionBackwardLauncher> registration(
    "attention_capped_backward", launch_tiles_backward<Tf32, BiasKind::kSoftcap>);
}  // namespace megasoftmax
