// Launches the kernel of pad_rows.cuh.
#include "pad_rows.cuh"

#include <algorithm>

namespace edgeless::cuda {

cudaError_t pad_rows(const RowsCopies& copies, cudaStream_t stream) {
  int64_t most = 0;
  for (int i = 0; i < copies.count; ++i) most = std::max(most, vectors_of(copies.at[i]));
  if (most == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((most + kThreads - 1) / kThreads), static_cast<unsigned>(copies.count));
  pad_rows_kernel<<<grid, kThreads, 0, stream>>>(copies);
  return cudaGetLastError();
}

}  // namespace edgeless::cuda
