// Launches the kernel of weights.cuh.
#include "weights.cuh"

#include "kernels.h"

namespace edgeless::cuda {
template <class A>
cudaError_t normalize_weights(const Args<A>& args, bool wide_index, cudaStream_t stream) {
  const int64_t items = args.graph.num_rows * args.heads;
  if (items == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  if (wide_index) {
    normalize_weights_kernel<A, int64_t><<<blocks, kBlock, 0, stream>>>(args);
  } else {
    normalize_weights_kernel<A, int32_t><<<blocks, kBlock, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template cudaError_t normalize_weights(const Args<float>&, bool, cudaStream_t);
template cudaError_t normalize_weights(const Args<double>&, bool, cudaStream_t);

}  // namespace edgeless::cuda
