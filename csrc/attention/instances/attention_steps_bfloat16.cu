#include "../dispatch.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, AttentionForwardLauncher> combine("attention_steps_combine",
                                                                    launch_combine<__nv_bfloat16>);
const Registration<__nv_bfloat16, AttentionBackwardLauncher> rows("attention_steps_rows",
                                                                  launch_rows<__nv_bfloat16>);
const Registration<__nv_bfloat16, AttentionBackwardLauncher> diagonals(
    "attention_steps_diagonals", launch_diagonals<__nv_bfloat16>);
const Registration<__nv_bfloat16, AttentionBackwardLauncher> query_gradient(
    "attention_steps_query_gradient", launch_query_gradient<__nv_bfloat16>);
const Registration<__nv_bfloat16, AttentionBackwardLauncher> bias_parts(
    "attention_steps_bias_parts", launch_bias_parts<__nv_bfloat16>);
}  // namespace megasoftmax
