// LSD radix sort of (key, position) pairs by CUB, over only as many bits as the number of keys needs, and launches of
// the small kernels around it (edge_sort.cuh). The sort is stable, so edges of one row keep their order.
#include <cub/device/device_radix_sort.cuh>

#include "edge_sort.cuh"
#include "edge_sort_cuda.h"

namespace edgeless::cuda {
namespace {

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
