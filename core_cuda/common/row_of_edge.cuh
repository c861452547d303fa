// Finds the row of each edge, for kernels with one thread per edge in CSR order. No torch.
#pragma once

#include <cstdint>

#include "storage.h"
#include "threads.cuh"

namespace edgeless::cuda {

__device__ __forceinline__ int64_t index_at(const void* indices, int64_t at, bool wide) {
  return wide ? __ldg(static_cast<const int64_t*>(indices) + at)
              : static_cast<int64_t>(__ldg(static_cast<const int32_t*>(indices) + at));
}

__device__ __forceinline__ int64_t id_of_edge(const CompressedGraph& graph, bool wide, int64_t position) {
  return graph.edge_ids ? index_at(graph.edge_ids, position, wide) : position;
}

// Number of edges that belong to a row; the arrays may have unused entries beyond the last row's end.
__device__ __forceinline__ int64_t edges_in_rows(const CompressedGraph& graph, bool wide) {
  return min(graph.num_edges, index_at(graph.indptr, graph.num_rows, wide));
}

// The row of an edge, found by binary search in [low, high].
__device__ inline int64_t row_of_edge(const CompressedGraph& graph, bool wide, int64_t position, int64_t low,
                                      int64_t high) {
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (index_at(graph.indptr, middle, wide) <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The first and the last row of the edges [begin, end), which must not be empty. To be called by the whole block.
struct RowBounds {
  int64_t low, high;

  __device__ RowBounds(const CompressedGraph& graph, bool wide, int64_t begin, int64_t end) {
    __shared__ int64_t bounds[2];
    if (threadIdx.x < 2) {
      bounds[threadIdx.x] = row_of_edge(graph, wide, threadIdx.x ? end - 1 : begin, 0, graph.num_rows - 1);
    }
    __syncthreads();
    low = bounds[0], high = bounds[1];
  }
};

// Calls f(position, row) for the thread's edges. one_row: all edges use row 0, which saves the search.
template <class F>
__device__ __forceinline__ void for_each_edge(const CompressedGraph& graph, bool wide, bool one_row, F&& f) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kEdgesOfBlock;
  const int64_t end = min(begin + kEdgesOfBlock, edges_in_rows(graph, wide));
  if (begin >= end) return;
  if (one_row) {
    for (int64_t position = begin + threadIdx.x; position < end; position += kThreads) f(position, int64_t(0));
    return;
  }
  const RowBounds rows(graph, wide, begin, end);
  for (int64_t position = begin + threadIdx.x; position < end; position += kThreads) {
    f(position, row_of_edge(graph, wide, position, rows.low, rows.high));
  }
}

}  // namespace edgeless::cuda
