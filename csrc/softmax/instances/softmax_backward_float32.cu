#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, SoftmaxBackwardLauncher> registration("softmax_backward",
                                                                launch_softmax_backward<float>);
}  // namespace megasoftmax
