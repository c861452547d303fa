// One thread an edge. Its row is looked up in indptr, where a scale of rows asks for it: values are mostly kept.
#include "../../common/row_of_edge.cuh"
#include "../../common/threads.cuh"
#include "../../common/vec.cuh"
#include "edge_values.h"

namespace edgeless::cuda::spmm {
namespace {

template <class A, class I>
__device__ A scale_of(const EdgeValues<A>& args, int64_t position) {
  A scale = 1;
  if (args.column_scale) scale = __ldg(args.column_scale + static_cast<const I*>(args.graph.indices)[position]);
  if (args.row_scale) {
    scale *= __ldg(args.row_scale + row_of_edge(args.graph, sizeof(I) == 8, position, 0, args.graph.num_rows - 1));
  }
  return scale;
}

template <class S, class A, class I>
__global__ void fill_kernel(const __grid_constant__ EdgeValues<A> args, S* values) {
  const int64_t position = thread_id();
  if (position >= args.graph.num_edges) return;
  A value = scale_of<A, I>(args, position);
  if (args.weight) value *= __ldg(args.weight + id_of_edge(args.graph, sizeof(I) == 8, position) * args.weight_edge);
  values[position] = to_storage<S>(value);
}

template <class A, class I>
__global__ void place_kernel(const __grid_constant__ EdgeValues<A> args, const A* by_position, A* products) {
  const int64_t position = thread_id();
  if (position >= args.graph.num_edges) return;
  products[id_of_edge(args.graph, sizeof(I) == 8, position)] = by_position[position] * scale_of<A, I>(args, position);
}

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
