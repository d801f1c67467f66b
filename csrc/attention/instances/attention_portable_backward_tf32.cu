#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<Tf32, AttentionBackwardLauncher> registration("attention_portable_backward",
                                                                 launch_portable_backward<Tf32>);
}  // namespace megasoftmax
