// Launches the kernels of walks.cuh and, between them, a scan of the segments' edge counts.
#include "walks.h"

#include <algorithm>
#include <cub/device/device_scan.cuh>

#include "walks.cuh"

namespace edgeless::cuda {
template <class I>
size_t walks_scratch(int64_t pieces) {
  size_t bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<I*>(nullptr), static_cast<I*>(nullptr), pieces + 1);
  return bytes;
}

template <class I>
cudaError_t make_walks(const WalksArgs<I>& args, void* scratch, cudaStream_t stream) {
  const int64_t most = std::max(args.edges, args.nodes) + 1;
  prepare_walks_kernel<I><<<blocks_for(most), kThreads, 0, stream>>>(args);
  size_t bytes = walks_scratch<I>(args.pieces);
  const cudaError_t error =
      cub::DeviceScan::ExclusiveSum(scratch, bytes, args.begins, args.begins, args.pieces + 1, stream);
  if (error != cudaSuccess) return error;
  const int64_t threads = std::max({args.pieces, args.pairs, args.nodes, int64_t{1}});
  walk_pieces_kernel<I><<<blocks_for(threads), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

#define INSTANTIATE(I)                       \
  template size_t walks_scratch<I>(int64_t); \
  template cudaError_t make_walks<I>(const WalksArgs<I>&, void*, cudaStream_t);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace edgeless::cuda
