#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, TopkBackwardLauncher> registration("topk_backward",
                                                             launch_topk_backward<float>);
}  // namespace megasoftmax
