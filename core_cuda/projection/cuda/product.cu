// Products of float32 matrices on tensor cores (float_tiles.cuh).
//
// A block makes 128 by 64 numbers of C, a warp 32 by 32, from three stages of 32 columns of A and B in shared memory.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "float_tiles.cuh"
#include "kernels.h"
#include "shared_memory.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::projection {
namespace {

using floats::kSharedBytes, floats::kStageA, floats::kStageB, floats::Operand;

// An infinity leaves no number behind when it is split: a result that is none is made once more, like this.
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

// C = A B^T: A(i, k) and B(j, k), of which either may lie with k as its rows.
template <bool kTransposedA, bool kTransposedB, bool kTwo>
__global__ void __launch_bounds__(kProductThreads, 2) product_kernel(const __grid_constant__ ProductArgs args) {
  extern __shared__ float4 memory[];
  float* shared = reinterpret_cast<float*>(memory);
  using A = Operand<kTileRows, kTransposedA>;
  using B = Operand<kTileColumns, kTransposedB>;
  const TilePlace place(args);
  Operands<A, B, kTwo> operands(args, place);
  const float* bias = static_cast<const float*>(args.bias);
  const auto stage_a = [&](int stage) { return shared + stage * (kStageA + kStageB); };
  const auto stage_b = [&](int stage) { return stage_a(stage) + kStageA; };
  const auto load = [&](int stage) { operands.load(stage_a(stage), stage_b(stage)); };

  float sum[kDown][kSide][4] = {}, part[kDown][kSide][4];
  const bool sums = kTransposedA && args.sums && place.makes_sums();
  float row_sum = 0;
  walk_depth(operands.steps(), load, [&](int stage) {
    const float *tile_a = stage_a(stage), *tile_b = stage_b(stage);
    if (sums) {
#pragma unroll 8
      for (int k = 0; k < kTileDepth; ++k) row_sum += A::get(tile_a, threadIdx.x, k);
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

template <bool kTransposedA, bool kTransposedB, bool kTwo = false>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const auto kernel = product_kernel<kTransposedA, kTransposedB, kTwo>;
  const cudaError_t error = allow_shared_memory(kernel, kSharedBytes, done);
  if (error != cudaSuccess) return error;
  kernel<<<product_grid(args), kProductThreads, kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

int64_t product_share(int64_t rows, int64_t columns, int64_t depth, int multiprocessors, int64_t most_shares) {
  const int64_t blocks = (rows + kTileRows - 1) / kTileRows * ((columns + kTileColumns - 1) / kTileColumns);
  const int64_t most = std::min(most_shares, (depth + 2 * kTileDepth - 1) / (2 * kTileDepth));
  const int64_t shares = std::max<int64_t>(1, std::min(most, 2 * multiprocessors / blocks));
  const int64_t share = (depth + shares - 1) / shares;
  return (share + kTileDepth - 1) / kTileDepth * kTileDepth;
}

cudaError_t run_product(bool transposed_a, bool transposed_b, const ProductArgs& args, cudaStream_t stream) {
  if (transposed_a) return transposed_b ? launch<true, true>(args, stream) : cudaErrorInvalidValue;
  if (args.more.a) return transposed_b ? cudaErrorInvalidValue : launch<false, false, true>(args, stream);
  return transposed_b ? launch<false, true>(args, stream) : launch<false, false>(args, stream);
}

}  // namespace edgeless::cuda::projection
