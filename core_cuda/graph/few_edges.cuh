// Kernels that sort the edges of a small graph, each in one cooperative launch (grid_sort.cuh): COO to CSR, and CSR to
// the CSR of the transpose. 32-bit results.
#pragma once

#include "few_edges.h"
#include "grid_sort.cuh"

namespace edgeless::cuda {

template <class In>
__global__ void __launch_bounds__(kGridThreads) few_coo_kernel(const __grid_constant__ CooLaunch<In> launch) {
  __shared__ GridSortRoom room;
  const auto& args = launch.of;
  if (args.bad && blockIdx.x == 0 && threadIdx.x < 2) args.bad[threadIdx.x] = 0;
  grid_sort(args.edges, args.num_rows, launch.sort, room,
            [&](int32_t i) { return static_cast<int32_t>(args.rows[i]); });
  for_items(args.edges, [&](int32_t p) {
    args.indices[p] = static_cast<int32_t>(args.cols[args.edge_ids[p]]);
    if (!args.bad) return;
    const auto outside = [](int64_t id, int64_t limit) { return id < 0 || id >= limit; };
    if (outside(args.rows[p], args.num_rows)) args.bad[0] = 1;
    if (outside(args.cols[p], args.num_cols)) args.bad[1] = 1;
  });
  find_rows(launch.sort.keys[0], args.edges, args.num_rows, args.indptr);
}

__global__ void __launch_bounds__(kGridThreads) few_transpose_kernel(const __grid_constant__ TransposeLaunch launch) {
  __shared__ GridSortRoom room;
  const auto& args = launch.of;
  grid_sort(args.edges, args.num_cols, launch.sort, room, [&](int32_t i) { return args.indices[i]; });
  for_items(args.edges, [&](int32_t p) {
    const int32_t from = args.to_edge_ids[p];
    args.to_indices[p] = row_of_position(args.indptr, args.num_rows, from);
    if (args.edge_ids) args.to_edge_ids[p] = args.edge_ids[from];
  });
  find_rows(launch.sort.keys[0], args.edges, args.num_cols, args.to_indptr);
}

}  // namespace edgeless::cuda
