#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<Tf32, AttentionForwardLauncher> registration(
    "attention_capped_forward", launch_tiles_forward<Tf32, BiasKind::kSoftcap>);
}  // namespace megasoftmax
