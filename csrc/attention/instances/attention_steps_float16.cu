#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__half, AttentionForwardLauncher> combine("attention_steps_combine",
                                                             launch_combine<__half>);
const Registration<__half, AttentionBackwardLauncher> rows("attention_steps_rows",
                                                           launch_rows<__half>);
const Registration<__half, AttentionBackwardLauncher> diagonals("attention_steps_diagonals",
                                                                launch_diagonals<__half>);
const Registration<__half, AttentionBackwardLauncher> query_gradient(
    "attention_steps_query_gradient", launch_query_gradient<__half>);
const Registration<__half, AttentionBackwardLauncher> bias_parts("attention_steps_bias_parts",
                                                                 launch_bias_parts<__half>);
}  // namespace megasoftmax
