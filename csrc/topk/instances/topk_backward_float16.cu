#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, TopkBackwardLauncher> registration("topk_backward",
                                                              launch_topk_backward<__half>);
}  // namespace megasoftmax
