#include "instances.h"

namespace megasoftmax {
const HasKernelsOf<SoftmaxLaunchers, __half> has_kernels(kSoftmaxLaunchers<__half>);
}  // namespace megasoftmax
