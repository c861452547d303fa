// Launch geometry of kernels with one thread per item or per edge. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "storage.h"

namespace edgeless::cuda {

constexpr int kThreads = 256;  // threads per block

// Number of thread blocks for `threads` threads.
constexpr int64_t blocks_for(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// Edges per block of kThreads: enough to make the search for the block's first and last row a small part of its work.
constexpr int kEdgesOfBlock = 2048;

constexpr int64_t blocks_for_edges(const CompressedGraph& graph) {
  return (graph.num_edges + kEdgesOfBlock - 1) / kEdgesOfBlock;
}

}  // namespace edgeless::cuda
