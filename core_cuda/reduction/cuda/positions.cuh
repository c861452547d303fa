// The kernel that writes the position of every edge within its row, [E] by original edge id, for 32-bit indices.
// Sub-warps of eight lanes have equal quotas of the CSR.
#pragma once

#include "../../common/segment_reduce.cuh"

namespace edgeless::cuda::reduction {

constexpr int kLanes = 8;

__global__ void __launch_bounds__(kReduceThreads)
    positions_kernel(const __grid_constant__ CompressedGraph graph, const Partition part, int32_t* positions) {
  __shared__ ReduceShares<int32_t> s;
  const int32_t* indptr = static_cast<const int32_t*>(graph.indptr);
  const int32_t* ids = static_cast<const int32_t*>(graph.edge_ids);
  const int lane = threadIdx.x % kLanes, sub_warp = threadIdx.x / kLanes;
  divide_range(graph, part, Workers{kReduceThreads / kLanes}, s);
  const Cut<int32_t> from = s.cuts[sub_warp], to = s.cuts[sub_warp + 1];
  for (int32_t row = from.row, at = from.edge; at < to.edge; ++row) {
    const int32_t begin = indptr[row], end = min(indptr[row + 1], to.edge);
    for (int32_t edge = at + lane; edge < end; edge += kLanes) positions[ids ? ids[edge] : edge] = edge - begin;
    at = max(at, end);
  }
}

}  // namespace edgeless::cuda::reduction
