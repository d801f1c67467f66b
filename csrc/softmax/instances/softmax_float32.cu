#include "instances.h"

namespace megasoftmax {
const HasKernelsOf<SoftmaxLaunchers, float> has_kernels(kSoftmaxLaunchers<float>);
}  // namespace megasoftmax
