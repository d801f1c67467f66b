#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_portable_backward", launch_portable_backward<__nv_bfloat16>);
}  // namespace megasoftmax
