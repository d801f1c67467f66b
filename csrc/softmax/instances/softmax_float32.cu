#include "instances.h"

namespace megasoftmax {
const KernelRegistration<SoftmaxLaunchers, float> registration(kSoftmaxLaunchers<float>);
}  // namespace megasoftmax
