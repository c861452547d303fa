// Sums of the neighbours of rows, a node's own row times a matrix, and a bias, written once: a block sums the
// neighbours of a tile of rows, as tile_sums.cuh and tensor_sums.cuh do, while the rows' own are on their way,
// multiplies these and adds. Tiles have about as much work each, whatever the degrees; of a row with very many
// neighbours sums are made before (hub_sums.cu). (short_rows.cu: where rows have few.)
#include <atomic>

#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "tensor_sums.cuh"

namespace edgeless::cuda::relational {
namespace {

template <class S, int kWidth, int kColumns = kRowColumns<S, kWidth>, bool kTwice = true>
struct Shape : RowSumsLayout<S, kWidth, kColumns, kTwice> {
  using Sums = TileSums<S, kWidth, kColumns, RowSumsLayout<S, kWidth, kColumns, kTwice>::kSumStride>;
  // That a multiprocessor has registers for.
  static constexpr int kBlocks = kWidth > 64 ? (sizeof(S) == 4 ? 1 : 2) : kColumns < kWarpColumns<kWidth> ? 2 : 4;
};

// The bias at `column` and the one behind it.
template <class S>
__device__ __forceinline__ float2 bias_at(const void* bias, int column) {
  if (!bias) return make_float2(0, 0);
  const S* at = static_cast<const S*>(bias) + column;
  return make_float2(to_arithmetic(at[0]), to_arithmetic(at[1]));
}

template <class S, int kWidth, int kColumns, bool kTransposed, bool kTwice>
__global__ void __launch_bounds__(TileSums<S, kWidth, kColumns>::kThreads, Shape<S, kWidth, kColumns, kTwice>::kBlocks)
    row_sums_kernel(const __grid_constant__ RowSumsArgs args) {
  using T = TileNumber<S>;
  using Of = Shape<S, kWidth, kColumns, kTwice>;
  using Product = WarpSum<1, kColumns / 8>;
  constexpr int kStride = Of::kStride;
  constexpr int kThreads = TileSums<S, kWidth, kColumns>::kThreads;
  extern __shared__ float4 memory[];
  __shared__ TileBegins begins;
  T* own = reinterpret_cast<T*>(memory);
  T* root = own + Of::kOwn;
  T* tile = root + Of::kRoot;  // of floats
  const int width = args.width, tiles = args.num_tiles;
  const int begin = min(static_cast<int>(blockIdx.x) * args.share, tiles), end = min(begin + args.share, tiles);
  if (begin >= end) return;
  TileWalk walk(args.tiles, args.ptr, begin, end, begins);
  uint4* const fragments = reinterpret_cast<uint4*>(root);
  if (!Of::kFragments && args.own.numbers) {
    ask_for_matrix<kWidth, kWidth, kStride, kThreads>(root, args.root.numbers, args.root.row_numbers,
                                                      kTransposed ? width : args.own_width,
                                                      kTransposed ? args.own_width : width);
  }
  const auto ask_for_own = [&](T* to, int64_t first, int count) {
    if (!args.own.numbers) return;
    const int64_t left = max(args.own_rows - first, int64_t{0});
    ask_for_matrix<kTilePieces, kWidth, kStride, kThreads>(
        to, static_cast<const T*>(args.own.numbers) + (left ? first * args.own.row_numbers : 0), args.own.row_numbers,
        static_cast<int>(min(left, int64_t{count})), args.own_width);
  };
  const FusedPlace<kWidth, kColumns> place;
  typename Of::Sums sums(args.neighbors, walk, tile, tile + Of::kSums);
  // The product of a tile's own rows, which is added to `product`, what else is, and the store.
  const auto finish = [&](int64_t first, int count, Product& product) {
    if (args.own.numbers) {
      const int depth = round_up(args.own_width, kMmaDepth<S>);
      Lines<T> columns;
      if constexpr (Of::kFragments) {
        const int row = static_cast<int>(args.root.row_numbers);
        multiply_fragments<kWidth, kTwice, kStride>(own, fragments, place.down, place.side, depth, product);
        columns = {static_cast<const T*>(args.root.numbers), kTransposed ? row : 1, kTransposed ? 1 : row};
      } else {
        add_product<S, false, !kTransposed, kStride, 0>(own, root, place.down, place.side, depth, product);
        columns = {root, kTransposed ? kStride : 1, kTransposed ? 1 : kStride};
      }
      make_again<S>(product.of[0], place.down, place.side, count, width, {own, kStride, 1}, columns, args.own_width);
    }
    const int in_group = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < place.kSides; ++j) {
      const int column = place.side + 8 * j + 2 * in_group;
      if (column >= width) continue;
      const float2 bias = bias_at<S>(args.bias, column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 sum = bias;
        if constexpr (std::is_same_v<S, float>) {
          const int row = place.down + threadIdx.x % 32 / 4 + 8 * h;
          const float2 of_tile = *reinterpret_cast<const float2*>(tile + row * Of::kSumStride + column);
          sum = make_float2(of_tile.x + bias.x, of_tile.y + bias.y);
        }
        product.of[0][j][2 * h] += sum.x, product.of[0][j][2 * h + 1] += sum.y;
      }
    }
    if (args.wide) {
      store_sums<false>(static_cast<float*>(args.out) + first * width, width, count, width, place.down, place.side,
                        product.of[0]);
    } else {
      store_sums<false>(static_cast<S*>(args.out) + first * width, width, count, width, place.down, place.side,
                        product.of[0]);
    }
  };
  sums.start();
  if constexpr (Of::kFragments) {  // while the first rows are on their way
    if (args.own.numbers) {
      put_fragments<kWidth, kTransposed, kTwice, kThreads>(fragments, static_cast<const T*>(args.root.numbers),
                                                           args.root.row_numbers, args.own_width, width);
    }
  }
  while (true) {
    const auto ask = [&] { ask_for_own(own, walk.first(), walk.count()); };
    Product product;
    if constexpr (std::is_same_v<S, float>) {
      sums.template to_tile<true>(ask);
    } else {
      product = sums.template sum<true>(ask);
    }
    const int count = walk.count();
    if (place.down < count && place.side < width) finish(walk.first(), count, product);
    if (!walk.more()) break;
    sums.advance();
  }
}

template <class S, int kWidth, bool kTransposed, int kColumns = kRowColumns<S, kWidth>, bool kTwice = true>
cudaError_t launch(const RowSumsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  using Of = Shape<S, kWidth, kColumns, kTwice>;
  const cudaError_t error =
      projection::allow_shared_memory(row_sums_kernel<S, kWidth, kColumns, kTransposed, kTwice>, Of::kBytes, done);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>((args.num_tiles + args.share - 1) / args.share);
  row_sums_kernel<S, kWidth, kColumns, kTransposed, kTwice>
      <<<blocks, TileSums<S, kWidth, kColumns>::kThreads, Of::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_row_sums(Storage storage, const RowSumsArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    const bool narrow = args.own_width <= 64 && args.width <= 64;
    if constexpr (sizeof(S) == 4) {
      if (args.own_width <= 32 && args.width <= 32) {
        return args.transposed ? launch<S, 32, true>(args, stream) : launch<S, 32, false>(args, stream);
      }
      if (narrow && args.little) {
        return args.transposed ? launch<S, 64, true, kFewColumns, false>(args, stream)
                               : launch<S, 64, false, kFewColumns, false>(args, stream);
      }
    } else {
      if (narrow && args.few) {
        return args.transposed ? launch<S, 64, true, kFewColumns>(args, stream)
                               : launch<S, 64, false, kFewColumns>(args, stream);
      }
    }
    if (args.transposed) return narrow ? launch<S, 64, true>(args, stream) : launch<S, 128, true>(args, stream);
    return narrow ? launch<S, 64, false>(args, stream) : launch<S, 128, false>(args, stream);
  });
}

}  // namespace edgeless::cuda::relational
