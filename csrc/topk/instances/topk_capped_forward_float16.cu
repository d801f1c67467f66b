#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, TopkForwardLauncher> registration("topk_capped_forward",
                                                             launch_topk_capped_forward<__half>);
}  // namespace megasoftmax
