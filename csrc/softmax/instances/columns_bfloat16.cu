#include "../columns.cuh"

namespace megasoftmax {
const Registration<__nv_bfloat16, ColumnsForwardLauncher> forward(
    "columns_forward", launch_columns_forward<__nv_bfloat16>);
const Registration<__nv_bfloat16, ColumnsBackwardLauncher> backward(
    "columns_backward", launch_columns_backward<__nv_bfloat16>);
}  // namespace megasoftmax
