// Products of float32 matrices on tensor cores (float_tiles.cuh).
//
// Tiles are of two shapes (tiles.cuh), as thresholds.h says.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../../thresholds.h"
#include "float_tiles.cuh"
#include "kernels.h"
#include "shared_memory.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::projection {
namespace {

using floats::Operand;

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

template <class Tiling, bool kTransposedA, bool kTransposedB>
struct Shared {
  using A = Operand<Tiling::kRows, kTransposedA, Tiling::kThreads>;
  using B = Operand<Tiling::kColumns, kTransposedB, Tiling::kThreads>;
  static constexpr int kStage = A::kNumbers + B::kNumbers;
  static constexpr int kBytes = Tiling::kStages * kStage * static_cast<int>(sizeof(float));
};

// C = A B^T: A(i, k) and B(j, k), of which either may lie with k as its rows.
template <class Tiling, bool kTransposedA, bool kTransposedB, bool kTwo>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocks)
    product_kernel(const __grid_constant__ ProductArgs args) {
  extern __shared__ float4 memory[];
  float* shared = reinterpret_cast<float*>(memory);
  using Of = Shared<Tiling, kTransposedA, kTransposedB>;
  using A = typename Of::A;
  using B = typename Of::B;
  const TilePlace<Tiling> place(args);
  Operands<A, B, kTwo, TilePlace<Tiling>> operands(args, place);
  const float* bias = static_cast<const float*>(args.bias);
  const auto stage_a = [&](int stage) { return shared + stage * Of::kStage; };
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
      for (int k = 0; k < kTileDepth; ++k) tile_sum += A::get(tile_a, threadIdx.x, k);
      row_sum += tile_sum;  // sums of sums round less
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

template <class Tiling, bool kTransposedA, bool kTransposedB, bool kTwo = false>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = Shared<Tiling, kTransposedA, kTransposedB>::kBytes;
  const auto kernel = product_kernel<Tiling, kTransposedA, kTransposedB, kTwo>;
  const cudaError_t error = allow_shared_memory(kernel, kBytes, done);
  if (error != cudaSuccess) return error;
  kernel<<<product_grid<Tiling>(args), Tiling::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Tiling>
cudaError_t launch_tiling(bool transposed_a, bool transposed_b, const ProductArgs& args, cudaStream_t stream) {
  if (transposed_a) return transposed_b ? launch<Tiling, true, true>(args, stream) : cudaErrorInvalidValue;
  if (args.more.a) return transposed_b ? cudaErrorInvalidValue : launch<Tiling, false, false, true>(args, stream);
  return transposed_b ? launch<Tiling, false, true>(args, stream) : launch<Tiling, false, false>(args, stream);
}

// divided: the depth is.
bool is_wide(int64_t rows, int64_t columns, int64_t depth, bool divided) {
  if (divided) return rows * columns >= kWideResult && depth >= kWideDividedDepth;
  return depth >= kWideDepth && WideTiling::blocks(rows, columns) >= kWideTiles;
}

}  // namespace

int64_t product_share(bool half, int64_t rows, int64_t columns, int64_t count, int64_t depth, int multiprocessors,
                      int64_t most_shares) {
  const auto share_of = [&](auto tiling) {
    using Of = decltype(tiling);
    const int64_t blocks = Of::blocks(rows, columns) * count;
    const int64_t most = std::min(most_shares, (depth + 2 * kTileDepth - 1) / (2 * kTileDepth));
    const int64_t shares = std::max<int64_t>(1, std::min(most, Of::kBlocks * multiprocessors / blocks));
    const int64_t share = (depth + shares - 1) / shares;
    return (share + kTileDepth - 1) / kTileDepth * kTileDepth;
  };
  if (half) return share_of(HalfTiling());
  return is_wide(rows, columns, depth, true) ? share_of(WideTiling()) : share_of(SquareTiling());
}

cudaError_t run_product(bool transposed_a, bool transposed_b, const ProductArgs& args, cudaStream_t stream) {
  return is_wide(args.rows, args.columns, args.depth, transposed_a)
             ? launch_tiling<WideTiling>(transposed_a, transposed_b, args, stream)
             : launch_tiling<SquareTiling>(transposed_a, transposed_b, args, stream);
}

}  // namespace edgeless::cuda::projection
