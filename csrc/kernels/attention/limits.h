// What attention kernels take.
#pragma once

namespace megasoftmax {

inline constexpr int kMaxHeadDim = 256;  // of queries and keys, and of values

}  // namespace megasoftmax
