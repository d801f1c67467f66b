#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionForwardLauncher> registration("attention_portable_forward",
                                                                 launch_portable_forward<float>);
}  // namespace megasoftmax
