#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionBackwardLauncher> registration("attention_portable_backward",
                                                                  launch_portable_backward<float>);
}  // namespace megasoftmax
