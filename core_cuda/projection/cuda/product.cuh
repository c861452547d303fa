// A GEMM kernel for float32 matrices on tensor cores, C = A B^T, with each element split into two TF32 values
// (float_tiles.cuh).
//
// A thread block computes one tile of C, whose size is set by its Tiling (tiles.cuh), with a pipeline of tiles of A and
// B in shared memory. blockIdx.y selects a split-K part, whose product is stored separately; blockIdx.z selects one of
// the products that share A. thresholds.h has the limits that choose the tiling.
#pragma once

#include <cstdint>

#include "float_tiles.cuh"
#include "kernels.h"
#include "tiles.cuh"

namespace edgeless::cuda::projection {

// Recomputes one element of C without tensor cores. This is necessary if the result is not finite: the remainder of a
// split infinity is NaN.
template <bool kTransposedA, bool kTransposedB>
__device__ __noinline__ float in_floats(const ProductArgs::Pair& pair, int64_t row, int64_t column, int64_t begin,
                                        int64_t end) {
  const float *a = static_cast<const float*>(pair.a), *b = static_cast<const float*>(pair.b);
  float x = 0;
  for (int64_t k = begin; k < end; ++k) {
    x = fmaf(a[kTransposedA ? k * pair.a_row + row : row * pair.a_row + k],
             b[kTransposedB ? k * pair.b_row + column : column * pair.b_row + k], x);
  }
  return x;
}

// C = A B^T with elements A(i, k) and B(j, k). kTransposed: k is the row index in memory.
template <class Tiling, bool kTransposedA, bool kTransposedB, bool kTwo>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocks)
    product_kernel(const __grid_constant__ ProductArgs args) {
  extern __shared__ float4 memory[];
  float* shared = reinterpret_cast<float*>(memory);
  using A = floats::Operand<Tiling::kRows, kTransposedA, Tiling::kThreads>;
  using B = floats::Operand<Tiling::kColumns, kTransposedB, Tiling::kThreads>;
  constexpr int kStage = float_stage<Tiling>(kTransposedA, kTransposedB);
  static_assert(kStage == A::kNumbers + B::kNumbers);
  const TilePlace<Tiling> place(args);
  Operands<A, B, kTwo, TilePlace<Tiling>> operands(args, place);
  const float* bias = static_cast<const float*>(args.bias);
  const auto stage_a = [&](int stage) { return shared + stage * kStage; };
  const auto stage_b = [&](int stage) { return stage_a(stage) + A::kNumbers; };
  const auto load = [&](int stage) { operands.load(stage_a(stage), stage_b(stage)); };

  typename Tiling::Sum sum = {}, part;
  const bool sums = kTransposedA && args.sums && place.makes_sums();
  float row_sum = 0;
  walk_depth<Tiling::kStages>(operands.steps(), load, [&](int stage) {
    const float *tile_a = stage_a(stage), *tile_b = stage_b(stage);
    if (sums) {
      float tile_sum = 0;
#pragma unroll 8
      for (int k = 0; k < kTileDepth; ++k)
        tile_sum += tile_a[kTransposedA ? k * A::kStride + threadIdx.x : threadIdx.x * A::kStride + k];
      row_sum += tile_sum;  // two-level sums have smaller rounding errors
    }
    floats::multiply_tiles<A, B>(tile_a, tile_b, place, sum, part);
  });

  if (sums && place.first_row + threadIdx.x < args.rows) {
    args.sums[blockIdx.y * args.c_share + place.first_row + threadIdx.x] = row_sum;
  }
  float* c = static_cast<float*>(args.of[blockIdx.z].c) + blockIdx.y * args.c_share;
  const int64_t c_row = args.of[blockIdx.z].c_row;
  const auto again = [&](int64_t row, int column) {
    const ProductArgs::Pair pair{args.a, args.of[blockIdx.z].b, args.a_row, args.of[blockIdx.z].b_row, args.depth};
    const float x = in_floats<kTransposedA, kTransposedB>(pair, row, column, place.begin, place.end);
    return kTwo ? x + in_floats<kTransposedA, kTransposedB>(args.more, row, column, 0, args.more.depth) : x;
  };
  const auto each = [&](auto&& use) {
    for_each_pair(place, place.first_row, args.rows, place.first_column, args.columns, sum, use);
  };
  each([&](int64_t row, int column, float& x, float& y) {
    if (!isfinite(x)) x = again(row, column);
    if (!isfinite(y)) y = again(row, column + 1);
    if (bias) x += bias[column], y += bias[column + 1];
  });
  if (args.add) add_numbers(c, c_row, place, args, sum);
  each([&](int64_t row, int column, float x, float y) {
    *reinterpret_cast<float2*>(c + row * c_row + column) = make_float2(x, y);
  });
}

}  // namespace edgeless::cuda::projection
