// One pass over the gradient of an output, grad [num_rows, width] (OwnGradientsArgs in segment_tiles.h has the shapes):
// own_gradients_kernel rounds grad to the dtype of the rows, stores the rounded rows if requested, and stores for every
// thread block the partial sums own^T grad [own_width, width] and the column sums of grad [width], from which
// add_gradients.cuh computes the gradients of the root weight and of the bias. The column sums are of grad before
// rounding.
//
// A thread block accumulates its part of own^T grad in registers over all its tiles of 64 rows. Shared memory holds a
// tile of both matrices, [64][width] each, and the column sums of the sub-warps. own_squares_kernel is for float32
// matrices of up to 64 columns, which need no rounding: each of its warps computes a square of own^T grad
// (squares.cuh), and the block prefetches its next tile while it multiplies one.
#pragma once

#include "geometry.h"
#include "squares.cuh"
#include "tile_products.cuh"

namespace edgeless::cuda::relational::own_gradients {

template <class S, int kWidth>
struct Shape : OwnGradientsLayout<S, kWidth> {
  // Target occupancy in blocks per SM.
  static constexpr int kBlocks = kWidth > 64 ? (sizeof(S) == 4 ? 1 : 2) : sizeof(S) == 4 ? 3 : 4;
};

template <class S, int kWidth>
__global__ void __launch_bounds__(kFusedThreads, Shape<S, kWidth>::kBlocks)
    own_gradients_kernel(const __grid_constant__ OwnGradientsArgs args) {
  using T = TileNumber<S>;
  using Of = Shape<S, kWidth>;
  constexpr int kStride = Of::kStride, kPer = kVec<S>;
  constexpr int kLanes = kWidth / kPer, kSubWarps = kFusedThreads / kLanes, kEach = kTileSegments / kSubWarps;
  extern __shared__ float4 memory[];
  T* own = reinterpret_cast<T*>(memory);
  T* grad = own + Of::kTile;
  float* sub_warp_sums = reinterpret_cast<float*>(grad + Of::kTile);
  const int in = args.own_width, out = args.width;
  const int sub_warp = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kPer;
  const bool inside = column < out;
  const int64_t begin = blockIdx.x * int64_t{args.share} * kTileSegments;
  const int64_t end = min(begin + int64_t{args.share} * kTileSegments, args.num_rows);
  const FusedPlace<kWidth> place;
  constexpr int kDown = kWidth / 64;
  WarpSum<kDown, place.kSides> outer;
  float sum[kPer] = {};
  for (int64_t first = begin; first < end; first += kTileSegments) {
    const int count = static_cast<int>(min(end - first, int64_t{kTileSegments}));
    if (args.own.numbers) {
      prefetch_matrix<kTileSegments, kWidth, kStride>(
          own, static_cast<const T*>(args.own.numbers) + first * args.own.row_numbers, args.own.row_numbers, count, in);
    }
    float x[kEach][kPer];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = sub_warp + i * kSubWarps;
      if (inside && row < count) {
        const int64_t at = (first + row) * args.grad.row_numbers + column;
        if (args.wide) {
          const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(args.grad.numbers) + at);
#pragma unroll
          for (int k = 0; k < kPer; k += 4) {
            const float4 four = __ldcs(from + k / 4);
            x[i][k] = four.x, x[i][k + 1] = four.y, x[i][k + 2] = four.z, x[i][k + 3] = four.w;
          }
        } else {
          unpack(load_once(reinterpret_cast<const char*>(static_cast<const S*>(args.grad.numbers) + at)), x[i], S{});
        }
      } else {
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[i][k] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = sub_warp + i * kSubWarps;
      const uint4 rounded = pack(x[i], S{});
      *reinterpret_cast<uint4*>(grad + row * kStride + column) = rounded;
      if (args.rows && inside && row < count) {
        *reinterpret_cast<uint4*>(static_cast<S*>(args.rows) + (first + row) * out + column) = rounded;
      }
#pragma unroll
      for (int k = 0; k < kPer; ++k) sum[k] += x[i][k];
    }
    if (!args.own.numbers) continue;
    await_all();
    __syncthreads();
    if (place.down < in && place.side < out) {
      const int depth = round_up(count, kMmaDepth<S>);
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
        WarpSum<1, place.kSides> product;
        const int down = place.down + 64 * i;
        add_product<S, true, true, kStride, 0>(own, grad, down, place.side, depth, product);
        make_again<S>(product.of[0], down, place.side, in, out, {own, 1, kStride}, {grad, 1, kStride}, count);
#pragma unroll
        for (int j = 0; j < place.kSides * 4; ++j) outer.of[i][j / 4][j % 4] += product.of[0][j / 4][j % 4];
      }
    }
    __syncthreads();
  }
  if (!args.partial) return;
  float* partial = args.partial + static_cast<int64_t>(blockIdx.x) * (in * out + out);
#pragma unroll
  for (int k = 0; k < kPer; ++k) sub_warp_sums[sub_warp * kWidth + column + k] = sum[k];
  __syncthreads();
  for (int at = threadIdx.x; at < out; at += kFusedThreads) {
    float all = 0;
    for (int other = 0; other < kSubWarps; ++other) all += sub_warp_sums[other * kWidth + at];
    partial[in * out + at] = all;
  }
  if (!args.own.numbers) return;
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
    store_sums<false>(partial, out, in, out, place.down + 64 * i, place.side, outer.of[i]);
  }
}

struct OwnTile {
  float4 own[kTileSegments * kSquareVectors], grad[kTileSegments * kSquareVectors];
};

static_assert(2 * sizeof(OwnTile) == kOwnSquaresBytes);

constexpr int kSquareBlocks = 3;  // target occupancy in blocks per SM, limited by shared memory

// Prefetches `count` rows from `first` on; tile elements behind them or behind the end of a row are zero.
__device__ __forceinline__ void prefetch_rows(float4* tile, const Rows& of, int64_t first, int count, int width) {
  constexpr int kLines = kSquareThreads / kSquareVectors;
  const int line = threadIdx.x / kSquareVectors, vector = threadIdx.x % kSquareVectors;
  const float* const from = static_cast<const float*>(of.numbers) + first * of.row_numbers + vector * 4;
#pragma unroll
  for (int row = line; row < kTileSegments; row += kLines) {
    const bool there = row < count && vector * 4 < width;
    copy_shared(projection::shared_address(tile + place_of(row, vector)),
                there ? from + row * of.row_numbers : static_cast<const float*>(of.numbers), there);
  }
}

__global__ void __launch_bounds__(kSquareThreads, kSquareBlocks)
    own_squares_kernel(const __grid_constant__ OwnGradientsArgs args) {
  extern __shared__ float4 memory[];
  OwnTile* const tiles = reinterpret_cast<OwnTile*>(memory);
  const int in = args.own_width, out = args.width;
  const int warp = threadIdx.x / 32, down = warp / 2 * kSquare, side = warp % 2 * kSquare;
  const int64_t begin = blockIdx.x * int64_t{args.share} * kTileSegments;
  const int64_t end = min(begin + int64_t{args.share} * kTileSegments, args.num_rows);
  const auto count_at = [&](int64_t first) { return static_cast<int>(min(end - first, int64_t{kTileSegments})); };
  const auto prefetch = [&](int64_t first, int slot) {
    if (first < end) {
      prefetch_rows(tiles[slot].own, args.own, first, count_at(first), in);
      prefetch_rows(tiles[slot].grad, args.grad, first, count_at(first), out);
    }
    projection::commit_stage();
  };
  Square outer = {};
  float4 sum = make_float4(0, 0, 0, 0);  // of four columns of grad over the lane's rows
  const auto add = [&](const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; };
  prefetch(begin, 0);
  int slot = 0;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kTileSegments, slot ^= 1) {
    prefetch(first + kTileSegments, slot ^ 1);
    await_all_but<1>();
    __syncthreads();
    const OwnTile& tile = tiles[slot];
    if (down < in && side < out) add_square(tile.own, tile.grad, down, side, count_at(first), outer, add);
    __syncthreads();
  }
  float* const partial = args.partial + static_cast<int64_t>(blockIdx.x) * (in * out + out);
  store_square(partial, in, out, down, side, outer);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sum.x += __shfl_xor_sync(kAllLanes, sum.x, step), sum.y += __shfl_xor_sync(kAllLanes, sum.y, step);
    sum.z += __shfl_xor_sync(kAllLanes, sum.z, step), sum.w += __shfl_xor_sync(kAllLanes, sum.w, step);
  }
  const int column = side + threadIdx.x % 32 / 4 * 4;
  if (down == 0 && threadIdx.x % 4 == 0 && column < out) {
    *reinterpret_cast<float4*>(partial + in * out + column) = sum;
  }
}

}  // namespace edgeless::cuda::relational::own_gradients
