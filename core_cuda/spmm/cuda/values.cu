// The weight of every edge, by position.
#include "kernels.h"
#include "weight.cuh"

namespace edgeless::cuda::spmm {
namespace {

constexpr int kThreads = 256;

template <class A>
__global__ void values_kernel(const __grid_constant__ SpmmArgs<A> args, A* values) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= args.graph.num_edges) return;
  const int32_t index = __ldcs(static_cast<const int32_t*>(args.graph.indices) + position);
  values[position] = edge_weight(args, index, static_cast<int32_t>(position), 0);
}

}  // namespace

template <class A>
cudaError_t fill_values(const SpmmArgs<A>& args, A* values, cudaStream_t stream) {
  values_kernel<A>
      <<<static_cast<unsigned>((args.graph.num_edges + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args, values);
  return cudaGetLastError();
}

template cudaError_t fill_values<float>(const SpmmArgs<float>&, float*, cudaStream_t);
template cudaError_t fill_values<double>(const SpmmArgs<double>&, double*, cudaStream_t);

}  // namespace edgeless::cuda::spmm
