#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxBackwardLauncher> registration("softmax_backward",
                                                                 launch_softmax_backward<__half>);
}  // namespace megasoftmax
