#include "../sm80/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionForwardLauncher> registration(
    "attention_portable_forward", launch_portable_forward<__nv_bfloat16>);
}  // namespace megasoftmax
