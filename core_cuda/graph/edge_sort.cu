// Least significant digit radix sort of (key, position) by CUB, over the bits that the number of keys needs, and the
// small kernels around it. Positions start in order and the sort is stable, so edges of one row keep their order.
#include <cub/device/device_radix_sort.cuh>

#include "../common/threads.cuh"
#include "edge_sort_cuda.h"

namespace edgeless::cuda {
namespace {

template <class In>
__global__ void check_kernel(const In* ids, int64_t count, int64_t limit, int32_t* bad) {
  const int64_t p = thread_id();
  if (p < count && (ids[p] < 0 || static_cast<int64_t>(ids[p]) >= limit)) *bad = 1;
}

template <class I>
__global__ void iota_kernel(I* to, int64_t count) {
  const int64_t p = thread_id();
  if (p < count) to[p] = static_cast<I>(p);
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

int bits_for(int64_t num_keys) {
  int bits = 1;
  while (bits < 63 && (int64_t(1) << bits) < num_keys) ++bits;
  return bits;
}

size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

template <class I>
size_t cub_bytes(int64_t count, int64_t num_keys) {
  size_t bytes = 0;
  cub::DeviceRadixSort::SortPairs(nullptr, bytes, static_cast<const I*>(nullptr), static_cast<I*>(nullptr),
                                  static_cast<const I*>(nullptr), static_cast<I*>(nullptr), count, 0,
                                  bits_for(num_keys));
  return bytes;
}

}  // namespace

template <class In>
cudaError_t check_ids(const In* ids, int64_t count, int64_t limit, int32_t* bad, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  check_kernel<<<blocks_for(count), kThreads, 0, stream>>>(ids, count, limit, bad);
  return cudaGetLastError();
}

template <class I>
cudaError_t expand_rows(const I* indptr, int64_t num_rows, int64_t num_edges, I* rows, cudaStream_t stream) {
  if (num_edges == 0) return cudaSuccess;
  expand_kernel<<<blocks_for(num_edges), kThreads, 0, stream>>>(indptr, num_rows, num_edges, rows);
  return cudaGetLastError();
}

template <class I>
size_t sort_scratch(int64_t count, int64_t num_keys) {
  return rounded(count * sizeof(I)) + cub_bytes<I>(count, num_keys);
}

template <class I>
cudaError_t sort_keys(const I* keys, int64_t count, int64_t num_keys, void* scratch, I* sorted, I* order,
                      cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  I* positions = static_cast<I*>(scratch);
  iota_kernel<<<blocks_for(count), kThreads, 0, stream>>>(positions, count);
  size_t bytes = cub_bytes<I>(count, num_keys);
  return cub::DeviceRadixSort::SortPairs(static_cast<char*>(scratch) + rounded(count * sizeof(I)), bytes, keys, sorted,
                                         positions, order, count, 0, bits_for(num_keys), stream);
}

template <class I>
cudaError_t row_pointers(const I* sorted, int64_t count, int64_t num_rows, I* indptr, cudaStream_t stream) {
  pointers_kernel<<<blocks_for(num_rows + 1), kThreads, 0, stream>>>(sorted, count, num_rows, indptr);
  return cudaGetLastError();
}

template <class In, class I>
cudaError_t permute(const In* from, const I* order, int64_t count, I* to, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  permute_kernel<<<blocks_for(count), kThreads, 0, stream>>>(from, order, count, to);
  return cudaGetLastError();
}

#define INSTANTIATE(I)                                                                           \
  template cudaError_t check_ids<I>(const I*, int64_t, int64_t, int32_t*, cudaStream_t);         \
  template cudaError_t expand_rows<I>(const I*, int64_t, int64_t, I*, cudaStream_t);             \
  template size_t sort_scratch<I>(int64_t, int64_t);                                             \
  template cudaError_t sort_keys<I>(const I*, int64_t, int64_t, void*, I*, I*, cudaStream_t);    \
  template cudaError_t row_pointers<I>(const I*, int64_t, int64_t, I*, cudaStream_t);            \
  template cudaError_t permute<int32_t, I>(const int32_t*, const I*, int64_t, I*, cudaStream_t); \
  template cudaError_t permute<int64_t, I>(const int64_t*, const I*, int64_t, I*, cudaStream_t);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace edgeless::cuda
