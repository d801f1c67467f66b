#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_portable_backward", launch_portable_backward<__half>);
}  // namespace megasoftmax
