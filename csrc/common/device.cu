// Asks the driver.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "device.h"

namespace megasoftmax {

namespace {
__global__ void probe() {}  // tells what all kernels are compiled for

// A row of kGpus; null where there is none.
const Gpu* gpu_of(int major, int minor) {
  for (const Gpu& gpu : kGpus)
    if (gpu.major == major && gpu.minor == minor) return &gpu;
  return nullptr;
}

// What both have.
Device limited(Device device, const Gpu& gpu) {
  device.shared_bytes = std::min(device.shared_bytes, gpu.shared_bytes);
  device.shared_bytes_per_sm = std::min(device.shared_bytes_per_sm, gpu.shared_bytes_per_sm);
  device.max_cluster = std::min(device.max_cluster, gpu.max_cluster);
  if (device.major >= 8) {  // else kernels of attention are missing
    device.major = gpu.major;
    device.minor = gpu.minor;
  }
  return device;
}

Device describe_device(int id) {
  Device device = {};
  cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, id);
  cudaDeviceGetAttribute(&device.minor, cudaDevAttrComputeCapabilityMinor, id);
  cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  cudaDeviceGetAttribute(&device.shared_bytes_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                         id);
  cudaDeviceGetAttribute(&device.cache_bytes, cudaDevAttrL2CacheSize, id);
  cudaFuncAttributes compiled = {};
  const bool has_code = cudaFuncGetAttributes(&compiled, probe) == cudaSuccess;
  const bool has_clusters = has_code && compiled.ptxVersion >= 90;
  const bool is_large = device.major == 9 || device.major == 10;
  device.max_cluster = !has_clusters ? 1 : is_large ? kMaxCluster : kPortableCluster;
  // Code for 7.5 lacks kernels: a later GPU that runs it is one of 7.5.
  return has_code && compiled.ptxVersion < 80 ? limited(device, *gpu_of(7, 5)) : device;
}

#if CUDART_VERSION >= 12050
// A function of the driver, to which nothing links; null where the driver is too old for it.
template <class Function>
Function* driver_function(const char* name) {
  constexpr unsigned kVersion = 12040;  // the first with green contexts
  void* function = nullptr;
  cudaDriverEntryPointQueryResult answer = {};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &answer);
  return error == cudaSuccess && answer == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Function*>(function)
             : nullptr;
}

// Those of the green context that the stream or the current context belongs to; else of the device.
int multiprocessors_at_hand(cudaStream_t stream, int of_device) {
  static auto* const green_context =
      driver_function<decltype(cuStreamGetGreenCtx)>("cuStreamGetGreenCtx");
  static auto* const green_resource =
      driver_function<decltype(cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource");
  static auto* const current_context =
      driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
  static auto* const context_resource =
      driver_function<decltype(cuCtxGetDevResource)>("cuCtxGetDevResource");
  if (!green_context || !green_resource || !current_context || !context_resource) return of_device;
  CUgreenCtx green = nullptr;
  CUcontext context = nullptr;
  CUdevResource resource = {};
  const bool is_green = green_context(stream, &green) == CUDA_SUCCESS && green != nullptr;
  const bool is_known =
      is_green ? green_resource(green, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS
               : current_context(&context) == CUDA_SUCCESS &&
                     context_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS;
  return is_known ? static_cast<int>(resource.sm.smCount) : of_device;
}
#else
int multiprocessors_at_hand(cudaStream_t, int of_device) { return of_device; }
#endif

// What all devices act as, for tests and benchmarks; null: as what they are. Libraries of kernels
// have one of their own, which stays null: launches ask it for little that a plan has not decided.
std::atomic<const Gpu*> acted{nullptr};

}  // namespace

Device current_device() {
  constexpr int kMaxDevices = 128;
  static std::array<std::once_flag, kMaxDevices> described;
  static std::array<Device, kMaxDevices> devices;
  int id = 0;
  cudaGetDevice(&id);
  id = std::min(id, kMaxDevices - 1);
  std::call_once(described[id], [id] { devices[id] = describe_device(id); });
  const Gpu* const gpu = acted.load(std::memory_order_relaxed);
  return gpu == nullptr ? devices[id] : limited(devices[id], *gpu);
}

Device device_at_hand(cudaStream_t stream) {
  Device device = current_device();
  const int multiprocessors = multiprocessors_at_hand(stream, device.multiprocessors);
  // A part of the multiprocessors may be unable to hold a cluster, so clusters are not used.
  if (multiprocessors < device.multiprocessors) {
    device.multiprocessors = multiprocessors;
    device.max_cluster = 1;
  }
  return device;
}

}  // namespace megasoftmax

// For tests and benchmarks: launches take the kernels of a GPU of kGpus, as far as this one can run
// them. 0, 0: of this one. Returns 0 where kGpus has no such GPU, and changes nothing.
extern "C" __attribute__((visibility("default"))) int megasoftmax_act_as(int major, int minor) {
  using namespace megasoftmax;
  const Gpu* const found = gpu_of(major, minor);
  if (found == nullptr && (major != 0 || minor != 0)) return 0;
  acted = found;
  return 1;
}

// The compute capability whose kernels launches on the current device take, 10 * major + minor: of
// the GPU, or of the code that it runs where that has no kernels of 8.0.
extern "C" __attribute__((visibility("default"))) int megasoftmax_capability() {
  const megasoftmax::Device device = megasoftmax::current_device();
  return 10 * device.major + device.minor;
}
