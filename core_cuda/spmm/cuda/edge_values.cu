// Launches the kernels of edge_values.cuh.
#include "edge_values.cuh"

namespace edgeless::cuda::spmm {
namespace {

template <class S, class A>
cudaError_t fill(const EdgeValues<A>& args, bool wide_index, void* values, cudaStream_t stream) {
  if (wide_index) {
    fill_kernel<S, A, int64_t>
        <<<blocks_for(args.graph.num_edges), kThreads, 0, stream>>>(args, static_cast<S*>(values));
  } else {
    fill_kernel<S, A, int32_t>
        <<<blocks_for(args.graph.num_edges), kThreads, 0, stream>>>(args, static_cast<S*>(values));
  }
  return cudaGetLastError();
}

}  // namespace

template <>
cudaError_t fill_edge_values(const EdgeValues<float>& args, Storage storage, bool wide_index, void* values,
                             cudaStream_t stream) {
  switch (storage) {
    case Storage::f32: return fill<float>(args, wide_index, values, stream);
    case Storage::f16: return fill<__half>(args, wide_index, values, stream);
    case Storage::bf16: return fill<__nv_bfloat16>(args, wide_index, values, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <>
cudaError_t fill_edge_values(const EdgeValues<double>& args, Storage, bool wide_index, void* values,
                             cudaStream_t stream) {
  return fill<double>(args, wide_index, values, stream);
}

template <class A>
cudaError_t place_products(const EdgeValues<A>& args, bool wide_index, const A* by_position, A* products,
                           cudaStream_t stream) {
  if (wide_index) {
    place_kernel<A, int64_t><<<blocks_for(args.graph.num_edges), kThreads, 0, stream>>>(args, by_position, products);
  } else {
    place_kernel<A, int32_t><<<blocks_for(args.graph.num_edges), kThreads, 0, stream>>>(args, by_position, products);
  }
  return cudaGetLastError();
}

template cudaError_t place_products<float>(const EdgeValues<float>&, bool, const float*, float*, cudaStream_t);
template cudaError_t place_products<double>(const EdgeValues<double>&, bool, const double*, double*, cudaStream_t);

}  // namespace edgeless::cuda::spmm
