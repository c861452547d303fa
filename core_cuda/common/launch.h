// The device, stream and device attributes of a CUDA op. Needs both torch and CUDA.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace edgeless {

// Makes a device current for the scope and returns its current stream.
class OnDevice {
 public:
  explicit OnDevice(const at::Device& device) : guard_(device), stream_(c10::cuda::getCurrentCUDAStream()) {}
  cudaStream_t stream() const { return stream_.stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
};

// Cheap enough to query on every call: the runtime caches attributes.
inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

}  // namespace edgeless
