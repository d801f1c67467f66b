#include "instances.h"

namespace megasoftmax {
const KernelRegistration<TopkLaunchers, __nv_bfloat16> registration(kTopkLaunchers<__nv_bfloat16>);
}  // namespace megasoftmax
