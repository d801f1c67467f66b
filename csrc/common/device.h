#pragma once
// What a device has, and what of it a launch may use.

#include <cuda_runtime_api.h>

#include "limits.h"

namespace megasoftmax {

// The device that is current; the driver is asked once for each. A test may have it act as another
// GPU, see device.cu.
Device current_device();
// What of it a launch on this stream may use.
Device device_at_hand(cudaStream_t stream);

// Calls plan(device), again where blocks have to run together and less is at hand: the driver takes
// a while to tell. Blocks that run together have a workspace or are a cluster.
template <class MakePlan>
auto plan_for(cudaStream_t stream, MakePlan&& plan) {
  const Device device = current_device();
  const auto of_device = plan(device);
  if (of_device.schedule.blocks_per_row == 1 && of_device.workspace_bytes == 0) return of_device;
  const Device at_hand = device_at_hand(stream);
  return at_hand.multiprocessors == device.multiprocessors ? of_device : plan(at_hand);
}

}  // namespace megasoftmax
