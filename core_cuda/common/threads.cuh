// The index of a thread in a grid of blocks of kThreads. No torch.
#pragma once

#include "threads.h"

namespace edgeless::cuda {

__device__ __forceinline__ int64_t thread_id() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

}  // namespace edgeless::cuda
