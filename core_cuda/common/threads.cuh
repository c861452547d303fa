// Launch geometry of kernels with one thread per item. No torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

constexpr int kThreads = 256;  // threads per block

inline unsigned blocks_for(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

__device__ __forceinline__ int64_t thread_id() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

}  // namespace edgeless::cuda
