// Kernels around cuSPARSE: fill_kernel writes the matrix values in CSR order, place_kernel scatters SDDMM products to
// original edge ids. One thread per edge. Where rows have a scale, a thread finds its row by binary search in indptr,
// which is affordable because values are mostly cached.
#pragma once

#include "../../common/row_of_edge.cuh"
#include "../../common/threads.cuh"
#include "../../common/vec.cuh"
#include "edge_values.h"

namespace edgeless::cuda::spmm {

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

}  // namespace edgeless::cuda::spmm
