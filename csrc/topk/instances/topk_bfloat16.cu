#include "instances.h"

namespace megasoftmax {
const HasKernelsOf<TopkLaunchers, __nv_bfloat16> has_kernels(kTopkLaunchers<__nv_bfloat16>);
}  // namespace megasoftmax
