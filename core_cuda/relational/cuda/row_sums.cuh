// The kernel that computes the output of a relational layer, out = A y + x W + bias, in one pass. A y has, for each row
// of the CSR graph, the sum of its neighbours' rows; x W is the product of the node's own row with the root matrix W,
// [own_width, width].
//
// A tile is up to 64 consecutive rows, and all tiles have about the same work, whatever the degrees. Hubs have parts of
// their sums computed before (hub_sums.cuh). A thread block walks the tiles of its quota. While it sums the neighbours
// of a tile (tile_sums.cuh, tensor_sums.cuh), the nodes' own rows are copied to shared memory asynchronously; it
// multiplies these on tensor cores and adds everything up, so each row of the output is written once. Where rows have
// few neighbours, short_rows.cuh is faster.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tensor_sums.cuh"

namespace edgeless::cuda::relational {

template <class S, int kWidth, int kColumns = kRowColumns<S, kWidth>, bool kTwice = true>
struct RowSumsShape : RowSumsLayout<S, kWidth, kColumns, kTwice> {
  using Sums = TileSums<S, kWidth, kColumns, RowSumsLayout<S, kWidth, kColumns, kTwice>::kSumStride>;
  // Target occupancy in blocks per SM.
  static constexpr int kBlocks = kWidth > 64 ? (sizeof(S) == 4 ? 1 : 2) : kColumns < kWarpColumns<kWidth> ? 2 : 4;
};

// The bias at `column` and at `column + 1`.
template <class S>
__device__ __forceinline__ float2 bias_at(const void* bias, int column) {
  if (!bias) return make_float2(0, 0);
  const S* at = static_cast<const S*>(bias) + column;
  return make_float2(to_arithmetic(at[0]), to_arithmetic(at[1]));
}

template <class S, int kWidth, int kColumns, bool kTransposed, bool kTwice>
__global__ void __launch_bounds__(TileSums<S, kWidth, kColumns>::kThreads,
                                  RowSumsShape<S, kWidth, kColumns, kTwice>::kBlocks)
    row_sums_kernel(const __grid_constant__ RowSumsArgs args) {
  using T = TileNumber<S>;
  using Of = RowSumsShape<S, kWidth, kColumns, kTwice>;
  using Product = WarpSum<1, kColumns / 8>;
  constexpr int kStride = Of::kStride;
  constexpr int kThreads = TileSums<S, kWidth, kColumns>::kThreads;
  extern __shared__ float4 memory[];
  __shared__ TileBegins begins;
  T* own = reinterpret_cast<T*>(memory);
  T* root = own + Of::kOwn;
  T* tile = root + Of::kRoot;  // sums of float rows; not used for 16-bit rows
  const int width = args.width, tiles = args.num_tiles;
  const int begin = min(static_cast<int>(blockIdx.x) * args.share, tiles), end = min(begin + args.share, tiles);
  if (begin >= end) return;
  TileWalk walk(args.tiles, args.ptr, begin, end, begins);
  uint4* const fragments = reinterpret_cast<uint4*>(root);
  if (!Of::kFragments && args.own.numbers) {
    prefetch_matrix<kWidth, kWidth, kStride, kThreads>(root, args.root.numbers, args.root.row_numbers,
                                                       kTransposed ? width : args.own_width,
                                                       kTransposed ? args.own_width : width);
  }
  const auto prefetch_own = [&](T* to, int64_t first, int count) {
    if (!args.own.numbers) return;
    const int64_t left = max(args.own_rows - first, int64_t{0});
    prefetch_matrix<kTileSegments, kWidth, kStride, kThreads>(
        to, static_cast<const T*>(args.own.numbers) + (left ? first * args.own.row_numbers : 0), args.own.row_numbers,
        static_cast<int>(min(left, int64_t{count})), args.own_width);
  };
  const FusedPlace<kWidth, kColumns> place;
  typename Of::Sums sums(args.neighbors, walk, tile, tile + Of::kSums);
  // Adds to `product` the tile's own rows times root, the sums of float rows and the bias, and stores the result.
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
  if constexpr (Of::kFragments) {  // the first rows are in flight meanwhile
    if (args.own.numbers) {
      put_fragments<kWidth, kTransposed, kTwice, kThreads>(fragments, static_cast<const T*>(args.root.numbers),
                                                           args.root.row_numbers, args.own_width, width);
    }
  }
  while (true) {
    const auto prefetch = [&] { prefetch_own(own, walk.first(), walk.count()); };
    Product product;
    if constexpr (std::is_same_v<S, float>) {
      sums.template to_tile<true>(prefetch);
    } else {
      product = sums.template sum<true>(prefetch);
    }
    const int count = walk.count();
    if (place.down < count && place.side < width) finish(walk.first(), count, product);
    if (!walk.more()) break;
    sums.advance();
  }
}

}  // namespace edgeless::cuda::relational
