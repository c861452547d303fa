// Launches the kernel of positions.cuh.
#include "positions.cuh"

#include "kernels.h"

namespace edgeless::cuda::reduction {
cudaError_t edge_positions(const CompressedGraph& graph, const Partition& part, int32_t* positions,
                           cudaStream_t stream) {
  positions_kernel<<<static_cast<unsigned>(part.num_ranges), kFoldThreads, 0, stream>>>(graph, part, positions);
  return cudaGetLastError();
}

}  // namespace edgeless::cuda::reduction
