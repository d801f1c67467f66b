#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, TopkForwardLauncher> registration("topk_forward",
                                                             launch_topk_forward<__half>);
}  // namespace megasoftmax
