// The kinds of edge weights of an SpMM, which select the kernel. No CUDA and no torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda::spmm {

// none: all weights are 1. by_edge: one weight for all heads, loaded by the lane that owns the edge together with its
// window; by_edge_ahead: like by_edge, but prefetched one window ahead. by_head: one weight per edge and head.
enum class Weighing : uint8_t { none, by_edge, by_edge_ahead, by_head };
inline constexpr const char* type_text(Weighing) { return "edgeless::cuda::spmm::Weighing"; }

}  // namespace edgeless::cuda::spmm
