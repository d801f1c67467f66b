#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionForwardLauncher> combine("attention_steps_combine",
                                                            launch_combine<float>);
const Registration<float, AttentionBackwardLauncher> rows("attention_steps_rows",
                                                          launch_rows<float>);
const Registration<float, AttentionBackwardLauncher> diagonals("attention_steps_diagonals",
                                                               launch_diagonals<float>);
const Registration<float, AttentionBackwardLauncher> query_gradient(
    "attention_steps_query_gradient", launch_query_gradient<float>);
const Registration<float, AttentionBackwardLauncher> bias_parts("attention_steps_bias_parts",
                                                                launch_bias_parts<float>);
}  // namespace megasoftmax
