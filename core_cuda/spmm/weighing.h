// How the edges of a sum are weighed: which kernel it takes. No torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda::spmm {

// by_edge_ahead: as by_edge, asked for a window ahead. by_head: each head of an edge has its own.
enum class Weighing : uint8_t { none, by_edge, by_edge_ahead, by_head };

}  // namespace edgeless::cuda::spmm
