#pragma once
// A barrier of all blocks of a launch, which must run together.

// Else it includes a part of the standard library that nothing here needs, which costs each file
// seconds.
#define _CG_LIMIT_INCLUDED_DEPENDENCIES
#include <cooperative_groups.h>

namespace megasoftmax {

__device__ inline void sync_grid() { cooperative_groups::this_grid().sync(); }

}  // namespace megasoftmax
