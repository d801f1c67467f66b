#include "../columns.cuh"

namespace megasoftmax {
const Registration<__half, ColumnsForwardLauncher> forward("columns_forward",
                                                           launch_columns_forward<__half>);
const Registration<__half, ColumnsBackwardLauncher> backward("columns_backward",
                                                             launch_columns_backward<__half>);
}  // namespace megasoftmax
