// Dispatch from a Storage to the C++ type that kernels are compiled for. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "storage.h"
#include "vec.cuh"

namespace edgeless::cuda {

// Calls f, which launches a kernel, with a zero of the storage's type. A: the opmath type, double for double storage
// only.
template <class A, class F>
cudaError_t with_storage(Storage storage, F&& f) {
  if constexpr (std::is_same_v<A, double>) {
    f(double{});
  } else {
    switch (storage) {
      case Storage::f16: f(__half{}); break;
      case Storage::bf16: f(__nv_bfloat16{}); break;
      default: f(float{}); break;
    }
  }
  return cudaGetLastError();
}

}  // namespace edgeless::cuda
