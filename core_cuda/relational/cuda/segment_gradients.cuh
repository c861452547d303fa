// The kernel that computes the gradients of a typed product of sums, on tensor cores.
//
// A segment has edges of one type and one row, and a tile has up to 64 segments of one type. Let g [segments,
// out_width] be the sums of the gradients over the edges of a tile's segments, and x [segments, in_width] the rows of
// the segments. For every tile the kernel computes g W^T, a row of in_width elements for each segment, and x^T g
// [in_width, out_width], which is a part of the gradient of the type's weight W.
//
// A thread block walks the tiles of its quota. It sums the edges of a tile into shared memory while the rows of x are
// copied there asynchronously, and computes both products from shared memory. The sum of x^T g stays in registers over
// all tiles of the block. So neither g nor a gradient of W per tile goes through global memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../projection/cuda/tiles.cuh"
#include "tensor_sums.cuh"

namespace edgeless::cuda::relational {

template <class S, int kWidth, int kColumns = kWarpColumns<kWidth>>
struct SegmentGradientsShape : GradientsLayout<S, kWidth, kColumns> {
  using Sums = TileSums<S, kWidth, kColumns, GradientsLayout<S, kWidth, kColumns>::kStride>;
  // Target occupancy in blocks per SM.
  static constexpr int kBlocks = kWidth > 64                       ? (sizeof(S) == 4 ? 1 : 2)
                                 : kColumns < kWarpColumns<kWidth> ? 2
                                 : sizeof(S) == 4 && kWidth == 64  ? 3
                                                                   : 4;
};

// Indices of the rows of x that the thread copies for a tile, loaded a tile ahead. Behind the tile's last segment they
// are stale or 0, and zeros are written instead of the row.
template <class S, int kWidth, int kThreads>
struct OwnRows {
  static constexpr int kInLine = kWidth / kVec<S>, kLines = kThreads / kInLine, kCopies = kTileSegments / kLines;
  int rows[kCopies] = {};
  int line = threadIdx.x / kInLine, in_line = threadIdx.x % kInLine * kVec<S>;

  __device__ __forceinline__ void find(const int32_t* rows_of, int first, int end) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int segment = first + line + i * kLines;
      if (segment < end) rows[i] = __ldcs(rows_of + segment);
    }
  }

  template <int kStride>
  __device__ __forceinline__ void load(TileNumber<S>* tile, const Rows& x, int count, int width) const {
    const bool inside = in_line < width;
    const char* numbers = static_cast<const char*>(x.numbers) + (inside ? in_line * sizeof(S) : 0);
    const uint32_t row_bytes = static_cast<uint32_t>(x.row_numbers * sizeof(S));
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = line + i * kLines;
      projection::copy_vector(tile + at * kStride + in_line, row_address(numbers, rows[i], row_bytes),
                              inside && at < count);
    }
  }
};

// The part of x^T g that a warp computes: 16 rows of every 64, and the same columns as in other products. Float tiles
// whose warps have all columns divide x^T g into squares, because splitting floats takes longer than multiplying them.
template <class S, int kWidth, int kColumns>
struct OuterPlace : FusedPlace<kWidth, kColumns> {
  static constexpr int kDown = kWidth / 64, kStep = 64;
};

template <int kWidth>
struct OuterPlace<float, kWidth, kWidth> {
  static constexpr int kDown = kWidth / 32, kStep = 16, kSides = kWidth / 16;
  int down = threadIdx.x / 64 * (kWidth / 2), side = threadIdx.x / 32 % 2 * (kWidth / 2);
};

template <class S, int kWidth, int kColumns>
__global__ void __launch_bounds__(TileSums<S, kWidth, kColumns>::kThreads,
                                  SegmentGradientsShape<S, kWidth, kColumns>::kBlocks)
    segment_gradients_kernel(const __grid_constant__ SegmentGradientsArgs args) {
  using T = TileNumber<S>;
  using Of = SegmentGradientsShape<S, kWidth, kColumns>;
  constexpr int kStride = Of::kStride;
  constexpr int kThreads = TileSums<S, kWidth, kColumns>::kThreads;
  extern __shared__ float4 memory[];
  __shared__ TileBegins begins;
  T* x = reinterpret_cast<T*>(memory);
  T* g = x + Of::kTile;
  T* weight = g + Of::kTile;
  const Range range = range_of_block(args.segments.by_type(), args.share);
  if (range.begin >= range.end) return;
  const int in = args.in_width, out = args.out_width;
  TileWalk walk(args.segments.tiles, args.segments.ptr, static_cast<int>(range.begin), static_cast<int>(range.end),
                begins);
  OwnRows<S, kWidth, kThreads> own;
  own.find(args.segments.rows, walk.bounds[0], walk.bounds[1]);
  const T* const weight_at = static_cast<const T*>(args.weight.numbers) + range.type * args.weight_type;
  if (!Of::kFragments && args.out) {
    prefetch_matrix<kWidth, kWidth, kStride, kThreads>(weight, weight_at, args.weight.row_numbers, in, out);
  }
  if constexpr (std::is_same_v<S, float>) {  // columns behind the end of rows stay zero
    for (int i = threadIdx.x; i < Of::kTile / 4; i += kThreads) {
      reinterpret_cast<float4*>(g)[i] = make_float4(0, 0, 0, 0);
    }
  }
  const FusedPlace<kWidth, kColumns> place;
  typename Of::Sums sums(args.neighbors, walk, g, weight + Of::kWeight);
  const OuterPlace<S, kWidth, kColumns> outer_place;
  constexpr int kDown = outer_place.kDown, kOuterSides = outer_place.kSides, kStep = outer_place.kStep;
  WarpSum<kDown, kOuterSides> outer;
  sums.start();
  uint4* const fragments = reinterpret_cast<uint4*>(weight);
  if constexpr (Of::kFragments) {  // the first rows are in flight meanwhile
    if (args.out) put_fragments<kWidth, true, false, kThreads>(fragments, weight_at, args.weight.row_numbers, out, in);
  }
  while (true) {
    const int count = walk.count(), depth = round_up(count, kMmaDepth<S>);
    const auto prefetch_own = [&] {
      if (!args.partial) return;
      own.template load<kStride>(x, args.x, count, in);
      own.find(args.segments.rows, walk.bounds[1], walk.bounds[2]);
    };
    const bool there = args.out && place.down < count && place.side < in;
    const int out_depth = round_up(out, kMmaDepth<S>);
    const auto store = [&](const auto& product) {
      store_sums<true>(static_cast<S*>(args.out) + static_cast<int64_t>(walk.first()) * in, in, count, in, place.down,
                       place.side, product.of[0]);
    };
    if constexpr (sizeof(S) == 2 && place.kBeside == 1) {  // a warp has whole rows of g
      const auto sum = sums.sum(prefetch_own);
      sums.put(sum);
      if (there) {
        WarpSum<1, place.kSides> product;
        add_product<S, false, kStride>(as_rows<S>(sum), weight, place.side, out_depth, product);
        store(product);
      }
      sums.await_others();
      __syncthreads();
    } else {
      sums.template to_tile<false>(prefetch_own);
      if (there) {
        WarpSum<1, place.kSides> product;
        Lines<T> columns;
        if constexpr (Of::kFragments) {
          multiply_fragments<kWidth, false, kStride>(g, fragments, place.down, place.side, out_depth, product);
          columns = {weight_at, static_cast<int>(args.weight.row_numbers), 1};
        } else {
          add_product<S, false, false, kStride, 0>(g, weight, place.down, place.side, out_depth, product);
          columns = {weight, kStride, 1};
        }
        make_again<S>(product.of[0], place.down, place.side, count, in, {g, kStride, 1}, columns, out);
        store(product);
      }
    }
    if (args.partial && outer_place.down < in && outer_place.side < out) {
      if constexpr (std::is_same_v<S, float>) {
        constexpr int kAtOnce = kStep == 16 ? kDown : 1;
#pragma unroll
        for (int i = 0; i < kDown; i += kAtOnce) {
          WarpSum<kAtOnce, kOuterSides> product;
          const int down = outer_place.down + kStep * i, side = outer_place.side;
          add_product<S, true, true, kStride, kStep>(x, g, down, side, depth, product);
#pragma unroll
          for (int h = 0; h < kAtOnce; ++h) {
            make_again<S>(product.of[h], down + kStep * h, side, in, out, {x, 1, kStride}, {g, 1, kStride}, count);
#pragma unroll
            for (int j = 0; j < kOuterSides * 4; ++j) outer.of[i + h][j / 4][j % 4] += product.of[h][j / 4][j % 4];
          }
        }
      } else {
        add_product<S, true, true, kStride, kStep>(x, g, outer_place.down, outer_place.side, depth, outer);
      }
    }
    if (!walk.more()) break;
    sums.advance();
  }
  if (!args.partial) return;
  float* partial = args.partial + static_cast<int64_t>(blockIdx.x) * in * out;
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
    store_sums<false>(partial, out, in, out, outer_place.down + kStep * i, outer_place.side, outer.of[i]);
  }
}

}  // namespace edgeless::cuda::relational
