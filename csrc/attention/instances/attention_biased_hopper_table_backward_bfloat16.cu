#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionBackwardLauncher> registration(
    "attention_biased_hopper_table_backward",
    launch_hopper_backward<__nv_bfloat16, HopperBias::kTable, HopperMask::kNone, HopperMask::kKeys,
                           HopperMask::kAny>);
}  // namespace megasoftmax
