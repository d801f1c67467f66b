#include "instances.h"

namespace megasoftmax {
const KernelRegistration<SoftmaxLaunchers, __nv_bfloat16> registration(
    kSoftmaxLaunchers<__nv_bfloat16>);
}  // namespace megasoftmax
