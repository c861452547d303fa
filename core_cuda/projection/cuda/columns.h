// The shape of thread blocks that sum columns (columns.cuh). No CUDA and no torch.
#pragma once

namespace edgeless::cuda::projection {

// Threads along the columns, rows at a time, and columns per thread.
constexpr int kLanes = 32, kSides = 8, kPer = 4;
constexpr int kManySides = 32;  // rows at a time if a block sums all rows

}  // namespace edgeless::cuda::projection
