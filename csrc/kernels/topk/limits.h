#pragma once
// Limits of softmax + top-k: the family's only ones.
// Plain C++, no CUDA, no torch.

namespace megasoftmax {

inline constexpr int kMaxK = 256;  // the most probabilities of a row, from 1 on

}  // namespace megasoftmax
