// Launch geometry of kernels with one thread per item. No CUDA and no torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

constexpr int kThreads = 256;  // threads per block

// Thread blocks for so many threads.
constexpr int64_t blocks_for(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

}  // namespace edgeless::cuda
