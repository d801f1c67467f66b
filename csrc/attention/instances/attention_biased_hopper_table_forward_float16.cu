#include "../sm90/dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionForwardLauncher> registration(
    "attention_biased_hopper_table_forward", launch_hopper_forward<__half, HopperBias::kTable>);
}  // namespace megasoftmax
