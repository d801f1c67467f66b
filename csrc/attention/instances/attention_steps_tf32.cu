#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<Tf32, AttentionForwardLauncher> combine("attention_steps_combine",
                                                           launch_combine<Tf32>);
const Registration<Tf32, AttentionBackwardLauncher> rows("attention_steps_rows", launch_rows<Tf32>);
const Registration<Tf32, AttentionBackwardLauncher> diagonals("attention_steps_diagonals",
                                                              launch_diagonals<Tf32>);
const Registration<Tf32, AttentionBackwardLauncher> query_gradient("attention_steps_query_gradient",
                                                                   launch_query_gradient<Tf32>);
const Registration<Tf32, AttentionBackwardLauncher> bias_parts("attention_steps_bias_parts",
                                                               launch_bias_parts<Tf32>);
}  // namespace megasoftmax
