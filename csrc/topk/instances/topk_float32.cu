#include "instances.h"

namespace megasoftmax {
const HasKernelsOf<TopkLaunchers, float> has_kernels(kTopkLaunchers<float>);
}  // namespace megasoftmax
