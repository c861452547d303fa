// What the edges of a sum weigh, and so which kernel it takes. No CUDA and no torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda::spmm {

// An edge weighs 1; one number for all heads, which the lane that owns the edge fetches, with its window or one ahead
// of it; any number per head.
enum class Weighing : uint8_t { none, by_edge, by_edge_ahead, by_head };

}  // namespace edgeless::cuda::spmm
