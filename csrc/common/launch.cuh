#pragma once
// Launching a kernel.

#include <cuda_runtime.h>

#include <utility>

#include "cuda_error.h"
#include "limits.h"

namespace megasoftmax {

// Of 48 KB, less what kernels declare themselves: at most 13 KB.
inline constexpr int kSharedMemoryWithoutOptIn = 32 * 1024;

template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes) {
  if (bytes <= kSharedMemoryWithoutOptIn) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <class Kernel>
cudaError_t allow_cluster(Kernel kernel, int blocks) {
  constexpr int kPortable = 8;
  if (blocks <= kPortable) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

template <int kCount, class Body, int... kIndices>
cudaError_t with_regime(int index, Body&& body, std::integer_sequence<int, kIndices...>) {
  cudaError_t error = cudaErrorInvalidValue;
  static_cast<void>(
      ((index == kIndices && (error = body.template operator()<kIndices>(), true)) || ...));
  return error;
}

// Calls body.operator()<index>() for a row of the table: the kernels are instantiated from it.
template <class Regime, int kCount, class Body>
cudaError_t with_regime(const Regime (&)[kCount], int index, Body&& body) {
  return with_regime<kCount>(index, std::forward<Body>(body),
                             std::make_integer_sequence<int, kCount>{});
}

// How the blocks of a launch belong together.
enum class Together {
  kNot,
  kInClusters,   // of blocks that follow each other in x
  kAll,          // they can wait for each other
  kOverlapping,  // they may begin before the launch before has ended, see wait_for_launch_before
};

// Whether launches may overlap: the GPU and the code that it runs are of compute capability 9.0 or
// later.
inline bool may_overlap(const Device& device) { return device.max_cluster > 1; }

// How many clusters of such blocks run at a time on the whole GPU; single blocks (cluster == 1) are
// counted on `multiprocessors`. The answer to the last question is kept: it takes the driver longer
// than a launch.
template <class Kernel>
cudaError_t resident_clusters(Kernel kernel, int threads, int shared_bytes, int cluster,
                              int multiprocessors, int64_t& count) {
  struct Answer {
    Kernel kernel;
    int device, shared_bytes, cluster;
    int64_t count;
  };
  thread_local Answer last = {};
  int device = 0;
  MEGASOFTMAX_RETURN_IF_ERROR(cudaGetDevice(&device));
  if (last.kernel != kernel || last.device != device || last.shared_bytes != shared_bytes ||
      last.cluster != cluster) {
    MEGASOFTMAX_RETURN_IF_ERROR(allow_shared_memory(kernel, shared_bytes));
    int found = 0;
    if (cluster == 1) {
      MEGASOFTMAX_RETURN_IF_ERROR(
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, shared_bytes));
    } else {
      MEGASOFTMAX_RETURN_IF_ERROR(allow_cluster(kernel, cluster));
      cudaLaunchAttribute attribute = {};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(static_cast<unsigned>(cluster));
      config.blockDim = dim3(static_cast<unsigned>(threads));
      config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
      config.attrs = &attribute;
      config.numAttrs = 1;
      MEGASOFTMAX_RETURN_IF_ERROR(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
    }
    last = {kernel, device, shared_bytes, cluster, found};
  }
  count = cluster == 1 ? last.count * multiprocessors : last.count;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
                   Together together, int cluster, cudaStream_t stream, Arguments&&... arguments) {
  MEGASOFTMAX_RETURN_IF_ERROR(allow_shared_memory(kernel, shared_bytes));
  cudaLaunchAttribute attribute = {};
  if (together == Together::kInClusters) {
    MEGASOFTMAX_RETURN_IF_ERROR(allow_cluster(kernel, cluster));
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  } else if (together == Together::kAll) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else if (together == Together::kOverlapping) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = together == Together::kNot ? 0 : 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace megasoftmax
