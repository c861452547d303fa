// The small kernels around the radix sort of COO edges (radix_sort.h). One thread per edge; pointers_kernel, which
// searches the sorted keys for row pointers, has one thread per row.
#pragma once

#include <cstdint>

#include "../common/threads.cuh"

namespace edgeless::cuda {

template <class In>
__global__ void check_kernel(const In* ids, int64_t count, int64_t limit, int32_t* bad) {
  const int64_t p = thread_id();
  if (p < count && (ids[p] < 0 || static_cast<int64_t>(ids[p]) >= limit)) *bad = 1;
}

template <class I>
__global__ void expand_kernel(const I* indptr, int64_t num_rows, int64_t num_edges, I* rows) {
  const int64_t p = thread_id();
  if (p >= num_edges) return;
  int64_t low = 0, high = num_rows - 1;  // the last row that begins at or before p
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (static_cast<int64_t>(indptr[middle]) <= p) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  rows[p] = static_cast<I>(low);
}

template <class I>
__global__ void pointers_kernel(const I* sorted, int64_t count, int64_t num_rows, I* indptr) {
  const int64_t row = thread_id();
  if (row > num_rows) return;
  int64_t low = 0, high = count;  // the first position whose key is not below the row
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (static_cast<int64_t>(sorted[middle]) < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  indptr[row] = static_cast<I>(low);
}

template <class In, class I>
__global__ void permute_kernel(const In* from, const I* order, int64_t count, I* to) {
  const int64_t p = thread_id();
  if (p < count) to[p] = static_cast<I>(from[order[p]]);
}

}  // namespace edgeless::cuda
