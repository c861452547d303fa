// The device, stream and device attributes of a CUDA op, through torch's interface for all devices. No CUDA.
#pragma once

#include <c10/core/DeviceGuard.h>

#include "../jit/launch.h"
#include "current_stream.h"

namespace edgeless {

// Makes a device current for the scope; kernels are launched on its current stream.
class OnDevice {
 public:
  explicit OnDevice(const at::Device& device)
      : guard_(device), queue_{current_cuda_stream(guard_.current_device().index()), guard_.current_device().index()} {}
  const jit::Queue& queue() const { return queue_; }

 private:
  c10::DeviceGuard guard_;
  jit::Queue queue_;
};

// Cheap enough to query on every call: the driver caches attributes.
inline int device_attribute(jit::Attribute attribute, int device) {
  return jit::Driver::get().attribute(attribute, device);
}

}  // namespace edgeless
