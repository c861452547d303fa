// From a storage to the C++ type of its numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../../common/storage.h"

namespace edgeless::cuda::relational {

// f of a number of the storage's type; on tensor cores there are no doubles.
template <bool kTensorCores, class F>
cudaError_t of_storage(Storage storage, F&& f) {
  switch (storage) {
    case Storage::f32: return f(float{});
    case Storage::f16: return f(__half{});
    case Storage::bf16: return f(__nv_bfloat16{});
    default: break;
  }
  if constexpr (kTensorCores) {
    return cudaErrorInvalidValue;
  } else {
    return f(double{});
  }
}

// Bytes of shared memory that a kernel for rows of `widest` numbers takes.
template <template <class, int> class Shape>
int shared_memory_of(Storage storage, int widest) {
  int bytes = 0;
  of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    bytes = widest <= 64 ? Shape<S, 64>::kBytes : Shape<S, 128>::kBytes;
    return cudaSuccess;
  });
  return bytes;
}

}  // namespace edgeless::cuda::relational
