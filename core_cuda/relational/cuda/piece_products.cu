// Sums of pieces times the matrix of their type: a block sums the edges of a tile of pieces into shared memory, as
// tile_sums.cuh does, and multiplies the sums there, so they are never written. The weight stays for all tiles of a
// block. Shared memory: the sums [64][width], the weight [width][width] as [depth][column], what teams leave each
// other.
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "tile_products.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, int kWidth>
struct Shape {
  static constexpr int kStride = kTileStride<S, kWidth>;
  static constexpr int kBytes = (kTilePieces + kWidth) * kStride * static_cast<int>(sizeof(S)) + kLeadBytes<S>;
  // That a multiprocessor has registers for.
  static constexpr int kBlocks = kWidth > 64 ? (sizeof(S) == 4 ? 1 : 2) : 3;
};

template <class S, int kWidth>
__global__ void __launch_bounds__(kFusedThreads, Shape<S, kWidth>::kBlocks)
    piece_products_kernel(const __grid_constant__ PieceProductsArgs args) {
  using T = TileNumber<S>;
  constexpr int kStride = Shape<S, kWidth>::kStride, kPer = kVec<S>;
  extern __shared__ float4 memory[];
  __shared__ int begins[2][kTilePieces + 1];
  T* sums = reinterpret_cast<T*>(memory);
  T* weight = sums + kTilePieces * kStride;
  float* leads = reinterpret_cast<float*>(weight + kWidth * kStride);
  const Range range = range_of_tile(args.pieces.by_type(), blockIdx.x, args.share);
  if (range.begin >= range.end) return;
  TileWalk walk(args.pieces.tiles, args.pieces.ptr, static_cast<int>(range.begin), static_cast<int>(range.end), begins);
  ask_for_matrix<kWidth, kWidth, kStride>(weight,
                                          static_cast<const T*>(args.weight.numbers) + range.type * args.weight_type,
                                          args.weight.row_numbers, args.in_width, args.out_width);
  for (int i = threadIdx.x; i < kTilePieces * kStride / kPer; i += kFusedThreads) {  // columns outside stay zero
    reinterpret_cast<uint4*>(sums)[i] = make_uint4(0, 0, 0, 0);
  }
  const FusedPlace<kWidth> place;
  TileGather<S> gather(args.neighbors);
  const auto store = [&](int piece, const float (&sum)[kPer]) {
    if (gather.lane() < args.neighbors.vectors) {
      *reinterpret_cast<uint4*>(sums + piece * kStride + gather.lane() * kPer) = pack(sum, S{});
    }
  };
  __syncthreads();
  gather.ask(walk.now(), walk.count(), gather.first_ids(walk.now(), walk.count()));
  while (true) {
    walk.ask_ahead();
    const auto next_ids = gather.first_ids(walk.next(), walk.next_count());
    gather.sum(walk.now(), walk.count(), leads, store);
    await_all();
    __syncthreads();
    walk.put_ahead();
    gather.ask(walk.next(), walk.next_count(), next_ids);
    const int count = walk.count();
    if (place.down < count && place.side < args.out_width) {
      WarpSum<1, place.kSides> product;
      add_product<S, false, true, kStride, 0>(sums, weight, place.down, place.side,
                                              round_up(args.in_width, kMmaDepth<S>), product);
      make_again<S>(product.of[0], place.down, place.side, count, args.out_width, {sums, kStride, 1},
                    {weight, 1, kStride}, args.in_width);
      store_sums<true>(static_cast<S*>(args.out) + static_cast<int64_t>(walk.first()) * args.out_width, args.out_width,
                       count, args.out_width, place.down, place.side, product.of[0]);
    }
    if (!walk.more()) break;
    walk.advance();
    __syncthreads();
  }
}

template <class S, int kWidth>
cudaError_t launch(const PieceProductsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = Shape<S, kWidth>;
  const cudaError_t error = projection::allow_shared_memory(piece_products_kernel<S, kWidth>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  piece_products_kernel<S, kWidth><<<blocks, kFusedThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_piece_products(Storage storage, const PieceProductsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.in_width <= 64 && args.out_width <= 64;
    return narrow ? launch<S, 64>(args, stream) : launch<S, 128>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
