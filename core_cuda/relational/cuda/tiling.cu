// Tiles of pieces and of rows: launches of the kernels (tiling.cuh), the kernel that counts the tiles of the types,
// which scans by CUB, and the scans of the device.
#include "tiling.h"

#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_scan.cuh>

#include "../../common/threads.cuh"
#include "tiling.cuh"

namespace edgeless::cuda::relational {
namespace {

constexpr int kScanThreads = 512;

// A single block: types are few beside edges.
template <class I>
__global__ void __launch_bounds__(kScanThreads) type_tiles_kernel(Tiling<I> args, int64_t* totals) {
  using Scan = cub::BlockScan<I, kScanThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage room;
  I before = 0;
  for (int64_t first = 0; first <= args.types; first += kScanThreads) {
    const int64_t type = first + threadIdx.x;
    const I count = type < args.types ? static_cast<I>(tiles_of_type(args, type)) : I(0);
    I begin, all;
    Scan(room).ExclusiveSum(count, begin, all);
    if (type <= args.types) args.type_tiles[type] = before + begin;
    before += all;
    __syncthreads();  // before the room is used again
  }
  if (totals && threadIdx.x < 2) totals[threadIdx.x] = 0;
}

}  // namespace

template <class I>
cudaError_t tile_pieces(const Tiling<I>& args, int64_t* totals, cudaStream_t stream) {
  type_tiles_kernel<I><<<1, kScanThreads, 0, stream>>>(args, totals);
  const int64_t threads = std::max(args.num_tiles(), totals ? args.num_rows : 0);
  tiles_kernel<I><<<blocks_for(threads), kThreads, 0, stream>>>(args, totals);
  return cudaGetLastError();
}

template <class I>
size_t hubs_scratch(int64_t num_rows) {
  size_t bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<I*>(nullptr), static_cast<I*>(nullptr), num_rows + 1);
  return bytes;
}

template <class I>
cudaError_t split_hubs(const Tiling<I>& args, void* scratch, cudaStream_t stream) {
  const int64_t ends = args.num_rows + 1;
  added_kernel<I><<<blocks_for(ends), kThreads, 0, stream>>>(args);
  size_t bytes = hubs_scratch<I>(args.num_rows);
  cudaError_t error = cub::DeviceScan::ExclusiveSum(scratch, bytes, args.hub_parts, args.hub_parts, ends, stream);
  if (error != cudaSuccess) return error;
  error = cub::DeviceScan::ExclusiveSum(scratch, bytes, args.of_rows, args.of_rows, ends, stream);
  if (error != cudaSuccess) return error;
  place_kernel<I><<<blocks_for(args.pieces), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class I>
cudaError_t tile_rows(const I* ptr, int64_t num_rows, int64_t count, I* row_tiles, cudaStream_t stream) {
  row_tiles_kernel<I><<<blocks_for(count), kThreads, 0, stream>>>(ptr, num_rows, count, row_tiles);
  return cudaGetLastError();
}

#define INSTANTIATE(I)                                                           \
  template cudaError_t tile_pieces<I>(const Tiling<I>&, int64_t*, cudaStream_t); \
  template size_t hubs_scratch<I>(int64_t);                                      \
  template cudaError_t split_hubs<I>(const Tiling<I>&, void*, cudaStream_t);     \
  template cudaError_t tile_rows<I>(const I*, int64_t, int64_t, I*, cudaStream_t);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace edgeless::cuda::relational
