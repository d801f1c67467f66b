#include "../columns.cuh"

namespace megasoftmax {
const Registration<float, ColumnsForwardLauncher> forward("columns_forward",
                                                          launch_columns_forward<float>);
const Registration<float, ColumnsBackwardLauncher> backward("columns_backward",
                                                            launch_columns_backward<float>);
}  // namespace megasoftmax
