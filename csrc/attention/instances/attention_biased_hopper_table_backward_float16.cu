#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionBackwardLauncher> registration(
    "attention_biased_hopper_table_backward",
    launch_hopper_backward<__half, HopperBias::kTable, HopperMask::kNone, HopperMask::kKeys,
                           HopperMask::kAny>);
}  // namespace megasoftmax
