// The kernel that writes every edge's weight in CSR order, [E], for 32-bit indices. One thread per edge.
#pragma once

#include "../../common/threads.cuh"
#include "args.h"
#include "weight.cuh"

namespace edgeless::cuda::spmm {

template <class A>
__global__ void values_kernel(const __grid_constant__ SpmmArgs<A> args, A* values) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= args.graph.num_edges) return;
  const int32_t index = __ldcs(static_cast<const int32_t*>(args.graph.indices) + position);
  values[position] = edge_weight(args, index, static_cast<int32_t>(position), 0);
}

}  // namespace edgeless::cuda::spmm
