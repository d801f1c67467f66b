#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<Tf32, AttentionForwardLauncher> registration("attention_portable_forward",
                                                                launch_portable_forward<Tf32>);
}  // namespace megasoftmax
