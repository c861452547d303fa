// A GEMM kernel for 16-bit matrices of few rows on tensor cores, C = A B^T with float32 accumulation. cuBLAS kernels
// are as fast on the device but take three to eight times as long to launch, which dominates if rows are few.
//
// A thread block computes a 128 x 64 tile of C and a warp a 32 x 32 tile of it, with a pipeline of three stages in
// shared memory. A stage holds tiles of A and B of depth 32.
#pragma once

#include <cstdint>

#include "../../common/vec.cuh"
#include "half_tiles.cuh"
#include "kernels.h"
#include "tiles.cuh"

namespace edgeless::cuda::projection {

// Stores two consecutive elements of C.
template <class T>
__device__ __forceinline__ void store_pair(T* to, float x, float y) {
  *reinterpret_cast<NumberPair<T>*>(to) = {to_storage<T>(x), to_storage<T>(y)};
}

// C = A B^T with elements A(i, k) and B(j, k). kTransposed: k is the row index in memory.
template <class S, bool kTransposedA, bool kTransposedB, bool kTwo>
__global__ void __launch_bounds__(HalfTiling::kThreads, HalfTiling::kBlocks)
    half_gemm_kernel(const __grid_constant__ ProductArgs args) {
  using A = half::Operand<HalfTiling::kRows, kTransposedA, HalfTiling::kThreads>;
  using B = half::Operand<HalfTiling::kColumns, kTransposedB, HalfTiling::kThreads>;
  __shared__ alignas(16) uint16_t tiles_a[HalfTiling::kStages][A::kNumbers];
  __shared__ alignas(16) uint16_t tiles_b[HalfTiling::kStages][B::kNumbers];
  const TilePlace<HalfTiling> place(args);
  const ProductArgs::Side& side = args.of[blockIdx.z];
  Operands<A, B, kTwo, TilePlace<HalfTiling>> operands(args, place);
  const auto load = [&](int stage) { operands.load(tiles_a[stage], tiles_b[stage]); };

  HalfTiling::Sum sum = {};
  const int64_t share = blockIdx.y * args.c_share;
  // C is loaded before the products, so that its loads are in flight together with the first tiles.
  if (args.add && args.wide) add_numbers(static_cast<const float*>(side.c) + share, side.c_row, place, args, sum);
  if (args.add && !args.wide) add_numbers(static_cast<const S*>(side.c) + share, side.c_row, place, args, sum);
  const bool sums = kTransposedA && args.sums && place.makes_sums();
  float row_sum = 0;
  walk_depth<HalfTiling::kStages>(operands.steps(), load, [&](int stage) {
    const uint16_t *tile_a = tiles_a[stage], *tile_b = tiles_b[stage];
    if (sums) {
      const S* column = reinterpret_cast<const S*>(tile_a) + threadIdx.x;
      float tile_sum = 0;
#pragma unroll 8
      for (int k = 0; k < kTileDepth; ++k) tile_sum += to_arithmetic(column[k * A::kStride]);
      row_sum += tile_sum;  // two-level sums have smaller rounding errors
    }
    half::multiply_tiles<S, A, B>(tile_a, tile_b, place, sum);
  });

  if (sums && place.first_row + threadIdx.x < args.rows) {
    args.sums[share + place.first_row + threadIdx.x] = row_sum;
  }
  const auto each = [&](auto&& use) {
    for_each_pair(place, place.first_row, args.rows, place.first_column, args.columns, sum, use);
  };
  if (const S* bias = static_cast<const S*>(args.bias)) {
    each([&](int64_t, int column, float& x, float& y) {
      x += to_arithmetic(bias[column]), y += to_arithmetic(bias[column + 1]);
    });
  }
  each([&](int64_t row, int column, float x, float y) {
    const int64_t at = share + row * side.c_row + column;
    if (args.wide) {
      store_pair(static_cast<float*>(side.c) + at, x, y);
    } else {
      store_pair(static_cast<S*>(side.c) + at, x, y);
    }
  });
}

}  // namespace edgeless::cuda::projection
