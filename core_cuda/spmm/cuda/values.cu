// Launches the kernel of values.cuh.
#include "values.cuh"

#include "kernels.h"

namespace edgeless::cuda::spmm {

template <class A>
cudaError_t fill_values(const SpmmArgs<A>& args, A* values, cudaStream_t stream) {
  values_kernel<A>
      <<<static_cast<unsigned>((args.graph.num_edges + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args, values);
  return cudaGetLastError();
}

template cudaError_t fill_values<float>(const SpmmArgs<float>&, float*, cudaStream_t);
template cudaError_t fill_values<double>(const SpmmArgs<double>&, double*, cudaStream_t);

}  // namespace edgeless::cuda::spmm
