#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, TopkForwardLauncher> registration("topk_forward",
                                                            launch_topk_forward<float>);
}  // namespace megasoftmax
