#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_biased_hopper_rows_backward",
    launch_hopper_backward<__nv_bfloat16, HopperBias::kRows, HopperMask::kNone, HopperMask::kKeys>);
}  // namespace megasoftmax
