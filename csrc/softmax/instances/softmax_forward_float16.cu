#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, SoftmaxForwardLauncher> registration("softmax_forward",
                                                                launch_softmax_forward<__half>);
}  // namespace megasoftmax
