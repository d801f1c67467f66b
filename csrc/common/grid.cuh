#pragma once
// A barrier of all blocks of a launch, which must run together.

// Else it includes a part of the standard library that nothing here needs, which costs each file
// seconds.
#define _CG_LIMIT_INCLUDED_DEPENDENCIES
#include <cooperative_groups.h>

namespace megasoftmax {

__device__ inline void sync_grid() { cooperative_groups::this_grid().sync(); }

// A barrier of some blocks of such a launch: it ends when `arrivals` has grown to `all`.
__device__ inline void sync_blocks(unsigned* arrivals, unsigned all) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned arrived;
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(arrived)
                   : "l"(arrivals)
                   : "memory");
    } while (arrived < all);
  }
  __syncthreads();
}

}  // namespace megasoftmax
