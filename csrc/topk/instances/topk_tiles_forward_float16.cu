#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, TopkForwardLauncher> registration("topk_tiles_forward",
                                                             launch_topk_tiles_forward<__half>);
}  // namespace megasoftmax
