#include "instances.h"

namespace megasoftmax {
const KernelRegistration<TopkLaunchers, __half> registration(kTopkLaunchers<__half>);
}  // namespace megasoftmax
