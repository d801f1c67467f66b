#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxForwardLauncher> registration("softmax_forward",
                                                               launch_softmax_forward<float>);
}  // namespace megasoftmax
