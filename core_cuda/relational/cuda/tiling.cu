// Tiles: one block adds up those of the types, then every tile finds its first piece or row, and every piece of a graph
// with hubs its place, on its own. Totals are of whole numbers, so the order in which they are added shows nowhere.
#include "tiling.h"

#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_scan.cuh>

#include "../../common/threads.cuh"

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

template <class I>
__global__ void tiles_kernel(Tiling<I> args, int64_t* totals) {
  const int64_t i = thread_id();
  if (i < args.num_tiles()) args.tiles[i] = static_cast<I>(first_piece_of_tile(args, i));
  if (!totals || i >= args.num_rows) return;
  const int64_t pieces = args.pieces_of_row(i);
  if (!is_hub(pieces)) return;
  auto* of = reinterpret_cast<unsigned long long*>(totals);
  atomicAdd(of, static_cast<unsigned long long>(parts_of_hub(pieces)));
  atomicAdd(of + 1, static_cast<unsigned long long>(pieces));
}

template <class I>
__global__ void added_kernel(Tiling<I> args) {
  const int64_t row = thread_id();
  if (row > args.num_rows) return;
  const int64_t pieces = row < args.num_rows ? args.pieces_of_row(row) : 0;
  const int64_t parts = is_hub(pieces) ? parts_of_hub(pieces) : 0;
  args.hub_parts[row] = static_cast<I>(parts);
  args.of_rows[row] = static_cast<I>(parts ? parts : pieces);
}

template <class I>
__global__ void place_kernel(Tiling<I> args) {
  const int64_t place = thread_id();
  if (place < args.by_row[args.num_rows]) place_piece(args, place);
}

template <class I>
__global__ void row_tiles_kernel(const I* ptr, int64_t num_rows, int64_t count, I* row_tiles) {
  const int64_t tile = thread_id();
  if (tile < count) row_tiles[tile] = static_cast<I>(first_row_of_tile(ptr, num_rows, tile));
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
