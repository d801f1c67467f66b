#include "instances.h"

namespace megasoftmax {
const KernelRegistration<TopkLaunchers, float> registration(kTopkLaunchers<float>);
}  // namespace megasoftmax
