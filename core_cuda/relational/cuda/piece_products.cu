// Sums of pieces times the matrix of their type: a block sums the edges of a tile of pieces, as tile_sums.cuh and
// tensor_sums.cuh do, and multiplies the sums, so they are never written. The weight stays for all tiles of a block.
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "tensor_sums.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
struct Shape : ProductsLayout<S, kWidth, kColumns> {
  // That a multiprocessor has registers for.
  static constexpr int kBlocks = kWidth > 64                       ? (sizeof(S) == 4 ? 1 : 2)
                                 : kColumns < kWarpColumns<kWidth> ? 2
                                 : sizeof(S) == 4 && kWidth == 64  ? 4
                                                                   : 5;
};

template <class S, int kWidth, int kColumns>
__global__ void __launch_bounds__(TileSums<S, kWidth, kColumns>::kThreads, Shape<S, kWidth, kColumns>::kBlocks)
    piece_products_kernel(const __grid_constant__ PieceProductsArgs args) {
  using T = TileNumber<S>;
  using Of = Shape<S, kWidth, kColumns>;
  constexpr int kStride = Of::kStride;
  constexpr int kThreads = TileSums<S, kWidth, kColumns>::kThreads;
  extern __shared__ float4 memory[];
  __shared__ TileBegins begins;
  T* tile = reinterpret_cast<T*>(memory);
  T* weight = tile + Of::kTile;
  const Range range = range_of_block(args.pieces.by_type(), args.share);
  if (range.begin >= range.end) return;
  TileWalk walk(args.pieces.tiles, args.pieces.ptr, static_cast<int>(range.begin), static_cast<int>(range.end), begins);
  const T* const weight_at = static_cast<const T*>(args.weight.numbers) + range.type * args.weight_type;
  if constexpr (!Of::kFragments) {
    ask_for_matrix<kWidth, kWidth, kStride, kThreads>(weight, weight_at, args.weight.row_numbers, args.in_width,
                                                      args.out_width);
  }
  if constexpr (std::is_same_v<S, float>) {  // columns outside stay zero
    for (int i = threadIdx.x; i < Of::kTile / 4; i += kThreads) {
      reinterpret_cast<float4*>(tile)[i] = make_float4(0, 0, 0, 0);
    }
  }
  const FusedPlace<kWidth, kColumns> place;
  TileSums<S, kWidth, kColumns> sums(args.neighbors, walk, tile, weight + Of::kWeight);
  sums.start();
  uint4* const fragments = reinterpret_cast<uint4*>(weight);
  if constexpr (Of::kFragments) {  // while the first rows are on their way
    put_fragments<kWidth, false, false, kThreads>(fragments, weight_at, args.weight.row_numbers, args.in_width,
                                                  args.out_width);
  }
  while (true) {
    const int count = walk.count(), depth = round_up(args.in_width, kMmaDepth<S>);
    const bool there = place.down < count && place.side < args.out_width;
    const auto store = [&](const auto& product) {
      store_sums<true>(static_cast<S*>(args.out) + static_cast<int64_t>(walk.first()) * args.out_width, args.out_width,
                       count, args.out_width, place.down, place.side, product.of[0]);
    };
    if constexpr (Of::kWholeRows) {
      const auto rows = as_rows<S>(sums.sum([] {}));
      if (there) {
        WarpSum<1, place.kSides> product;
        add_product<S, true, kStride>(rows, weight, place.side, depth, product);
        store(product);
      }
    } else {
      sums.template to_tile<false>([] {});
      if (there) {
        WarpSum<1, place.kSides> product;
        Lines<T> columns;
        if constexpr (Of::kFragments) {
          multiply_fragments<kWidth, false, kStride>(tile, fragments, place.down, place.side, depth, product);
          columns = {weight_at, 1, static_cast<int>(args.weight.row_numbers)};
        } else {
          add_product<S, false, true, kStride, 0>(tile, weight, place.down, place.side, depth, product);
          columns = {weight, 1, kStride};
        }
        make_again<S>(product.of[0], place.down, place.side, count, args.out_width, {tile, kStride, 1}, columns,
                      args.in_width);
        if (std::is_same_v<S, float> && args.neighbors.of_pieces) {  // of 16 bits the sums have theirs
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int piece = place.down + threadIdx.x % 32 / 4 + h * 8;
            const float by = piece < count ? __ldg(args.neighbors.of_pieces + walk.first() + piece) : 1;
#pragma unroll
            for (int i = 0; i < place.kSides; ++i) product.of[0][i][2 * h] *= by, product.of[0][i][2 * h + 1] *= by;
          }
        }
        store(product);
      }
    }
    if (!walk.more()) break;
    sums.advance();
  }
}

template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
cudaError_t launch(const PieceProductsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = Shape<S, kWidth, kColumns>;
  const cudaError_t error =
      projection::allow_shared_memory(piece_products_kernel<S, kWidth, kColumns>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(num_tiles(args.pieces.count, args.pieces.types, args.share));
  piece_products_kernel<S, kWidth, kColumns>
      <<<blocks, TileSums<S, kWidth, kColumns>::kThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_piece_products(Storage storage, const PieceProductsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.in_width <= 64 && args.out_width <= 64;
    if constexpr (sizeof(S) == 4) {
      if (args.in_width <= 32 && args.out_width <= 32) return launch<S, 32>(args, stream);
    }
    if (narrow && args.few) return launch<S, 64, kFewColumns>(args, stream);
    return narrow ? launch<S, 64>(args, stream) : launch<S, 128>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
