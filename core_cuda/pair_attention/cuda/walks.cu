// Walks over pairs: a thread for every edge, a scan of the pieces' edges, and a thread for every piece.
#include "walks.h"

#include <algorithm>
#include <cub/device/device_scan.cuh>

#include "../../common/threads.cuh"

namespace edgeless::cuda {
namespace {

constexpr int kWarp = 32;

template <class I>
__global__ void prepare_walks_kernel(WalksArgs<I> args) {
  prepare_walks(args, thread_id());
}

template <class I>
__global__ void walk_pieces_kernel(WalksArgs<I> args) {
  const int64_t i = thread_id();
  if (i < args.pieces) walk_piece(args, i);
  for (int which = 0; which < 3; ++which) {
    int64_t most = walk_length(args, which, i);
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      const int64_t other = __shfl_xor_sync(~0u, static_cast<long long>(most), lanes);
      most = most < other ? other : most;
    }
    // It never falls, so that one who reads too early asks in vain at worst.
    auto* longest = reinterpret_cast<long long*>(args.longest + which);
    if (threadIdx.x % kWarp == 0 && most > *static_cast<volatile long long*>(longest)) {
      atomicMax(longest, static_cast<long long>(most));
    }
  }
}

}  // namespace

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
