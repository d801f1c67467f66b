#pragma once
// What GPUs have. Plain C++, no CUDA, no torch.

#include <cstdint>

namespace megasoftmax {

// What a plan depends on besides the call.
struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;         // of a block, at most
  int shared_bytes_per_sm = 0;  // of a multiprocessor
  int max_cluster = 1;          // blocks of a cluster, as device and compiled code allow; 1: none
  int major = 0, minor = 0;     // of the compute capability
  int cache_bytes = 0;          // of the L2 cache
};

// Bytes of a multiprocessor that each block takes besides, from compute capability 8.0 on.
inline constexpr int kReservedSharedBytes = 1024;
inline constexpr int kMaxCluster = 16, kPortableCluster = 8;

// By compute capability. Others that are later have as much as one of these.
struct Gpu {
  int major, minor;
  int shared_bytes, shared_bytes_per_sm, max_cluster;  // as in Device
};
// clang-format off
inline constexpr Gpu kGpus[] = {
    // capability, bytes/block, bytes/SM, cluster
    { 7, 5,             65536,    65536,       1},  // RTX 20, GTX 16, T4
    { 8, 0,            166912,   167936,       1},  // A100
    { 8, 6,            101376,   102400,       1},  // RTX 30, A10, A40
    { 8, 9,            101376,   102400,       1},  // RTX 40, L4, L40S
    { 9, 0,            232448,   233472,      16},  // H100, H200
    {10, 0,            232448,   233472,      16},  // B200
    {10, 3,            232448,   233472,      16},  // B300
    {12, 0,            101376,   102400,       8},  // RTX 50
};
// clang-format on

// What a block may have of every GPU whose compute capability has such a major number.
constexpr int least_shared_bytes(int first_major, int last_major = INT32_MAX) {
  int least = INT32_MAX;
  for (const Gpu& gpu : kGpus) {
    if (gpu.major >= first_major && gpu.major <= last_major && gpu.shared_bytes < least)
      least = gpu.shared_bytes;
  }
  return least;
}

// Shared memory of a block that copies zeros from there: ZeroBlock.
inline constexpr int kZeroBytes = 4096;

}  // namespace megasoftmax
