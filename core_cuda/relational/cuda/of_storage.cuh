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

}  // namespace edgeless::cuda::relational
