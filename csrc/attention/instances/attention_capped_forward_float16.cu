#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionForwardLauncher> registration(
    "attention_capped_forward", launch_tiles_forward<__half, BiasKind::kSoftcap>);
}  // namespace megasoftmax
