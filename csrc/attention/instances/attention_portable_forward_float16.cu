#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionForwardLauncher> registration("attention_portable_forward",
                                                                  launch_portable_forward<__half>);
}  // namespace megasoftmax
