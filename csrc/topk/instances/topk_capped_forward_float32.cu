#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, TopkForwardLauncher> registration("topk_capped_forward",
                                                            launch_topk_capped_forward<float>);
}  // namespace megasoftmax
