#include "instances.h"

namespace megasoftmax {
const HasKernelsOf<SoftmaxLaunchers, __nv_bfloat16> has_kernels(kSoftmaxLaunchers<__nv_bfloat16>);
}  // namespace megasoftmax
