// The kernel that multiplies the sums of segments by the matrix of their type, on tensor cores.
//
// A segment has edges of one type and one row, and a tile has up to 64 segments of one type. For every segment the
// kernel sums the rows of the neighbours at its edges, in_width elements, multiplies the sum by the weight of the type,
// [in_width, out_width], and stores one row of out_width elements.
//
// A thread block walks the tiles of its quota, whose segments are all of one type. The sums of a tile stay in shared
// memory or in registers (tile_sums.cuh, tensor_sums.cuh), so they are never written to global memory, and the weight
// is copied to shared memory once for all tiles of the block.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tensor_sums.cuh"

namespace edgeless::cuda::relational {

template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
struct SegmentProductsShape : ProductsLayout<S, kWidth, kColumns> {
  // Target occupancy in blocks per SM.
  static constexpr int kBlocks = kWidth > 64                       ? (sizeof(S) == 4 ? 1 : 2)
                                 : kColumns < kWarpColumns<kWidth> ? 2
                                 : sizeof(S) == 4 && kWidth == 64  ? 4
                                                                   : 5;
};

template <class S, int kWidth, int kColumns>
__global__ void __launch_bounds__(TileSums<S, kWidth, kColumns>::kThreads,
                                  SegmentProductsShape<S, kWidth, kColumns>::kBlocks)
    segment_products_kernel(const __grid_constant__ SegmentProductsArgs args) {
  using T = TileNumber<S>;
  using Of = SegmentProductsShape<S, kWidth, kColumns>;
  constexpr int kStride = Of::kStride;
  constexpr int kThreads = TileSums<S, kWidth, kColumns>::kThreads;
  extern __shared__ float4 memory[];
  __shared__ TileBegins begins;
  T* tile = reinterpret_cast<T*>(memory);
  T* weight = tile + Of::kTile;
  const Range range = range_of_block(args.segments.by_type(), args.share);
  if (range.begin >= range.end) return;
  TileWalk walk(args.segments.tiles, args.segments.ptr, static_cast<int>(range.begin), static_cast<int>(range.end),
                begins);
  const T* const weight_at = static_cast<const T*>(args.weight.numbers) + range.type * args.weight_type;
  if constexpr (!Of::kFragments) {
    prefetch_matrix<kWidth, kWidth, kStride, kThreads>(weight, weight_at, args.weight.row_numbers, args.in_width,
                                                       args.out_width);
  }
  if constexpr (std::is_same_v<S, float>) {  // columns behind the end of rows stay zero
    for (int i = threadIdx.x; i < Of::kTile / 4; i += kThreads) {
      reinterpret_cast<float4*>(tile)[i] = make_float4(0, 0, 0, 0);
    }
  }
  const FusedPlace<kWidth, kColumns> place;
  TileSums<S, kWidth, kColumns> sums(args.neighbors, walk, tile, weight + Of::kWeight);
  sums.start();
  uint4* const fragments = reinterpret_cast<uint4*>(weight);
  if constexpr (Of::kFragments) {  // the first rows are in flight meanwhile
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
        if (std::is_same_v<S, float> && args.neighbors.of_segments) {  // sums of 16-bit rows are multiplied already
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int segment = place.down + threadIdx.x % 32 / 4 + h * 8;
            const float by = segment < count ? __ldg(args.neighbors.of_segments + walk.first() + segment) : 1;
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

}  // namespace edgeless::cuda::relational
