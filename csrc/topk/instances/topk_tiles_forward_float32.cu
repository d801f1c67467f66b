#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, TopkForwardLauncher> registration("topk_tiles_forward",
                                                            launch_topk_tiles_forward<float>);
}  // namespace megasoftmax
