#include "instances.h"

namespace megasoftmax {
const KernelRegistration<SoftmaxLaunchers, __half> registration(kSoftmaxLaunchers<__half>);
}  // namespace megasoftmax
