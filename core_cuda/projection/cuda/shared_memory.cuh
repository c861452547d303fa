// Opt-in to more dynamic shared memory than the default limit.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace edgeless::cuda::projection {

// Raises the kernel's limit of dynamic shared memory on the current device. `done` has a bit for each of the first 64
// devices where this is done, because the call takes a third as long as a launch.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (failed == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return failed;
}

}  // namespace edgeless::cuda::projection
