#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<float, AttentionForwardLauncher> combine("attention_combine",
                                                            launch_combine<float>);
const Registration<float, AttentionBackwardLauncher> rows("attention_rows", launch_rows<float>);
const Registration<float, AttentionBackwardLauncher> diagonals("attention_diagonals",
                                                               launch_diagonals<float>);
const Registration<float, AttentionBackwardLauncher> query_gradient("attention_query_gradient",
                                                                    launch_query_gradient<float>);
const Registration<float, AttentionBackwardLauncher> bias_parts("attention_bias_parts",
                                                                launch_bias_parts<float>);
}  // namespace megasoftmax
