#include "instances.h"

namespace megasoftmax {
const HasKernelsOf<TopkLaunchers, __half> has_kernels(kTopkLaunchers<__half>);
}  // namespace megasoftmax
