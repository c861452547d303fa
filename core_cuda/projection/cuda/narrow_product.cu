// Products of 16-bit matrices of few rows, summed in floats. The libraries' are as fast on the device, but take three
// to eight times as long to launch, which is what counts there.
//
// A block makes 128 by 64 numbers of C, a warp 32 by 32, from three stages of 32 columns of A and B in shared memory.
#include "../../common/vec.cuh"
#include "kernels.h"
#include "narrow.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::maps {
namespace {

using narrow::Operand;

// Two numbers of C side by side, in its own type.
template <class T>
__device__ __forceinline__ void store_pair(const ProductArgs& args, T* to, float x, float y) {
  if (args.add) x += to_arithmetic(to[0]), y += to_arithmetic(to[1]);
  struct alignas(2 * sizeof(T)) Pair {
    T x, y;
  };
  *reinterpret_cast<Pair*>(to) = {to_storage<T>(x), to_storage<T>(y)};
}

// C = A B^T: A(i, k) and B(j, k), of which either may lie with k as its rows.
template <class S, bool kAcrossA, bool kAcrossB, bool kTwo>
__global__ void __launch_bounds__(kProductThreads, 2) narrow_product_kernel(const __grid_constant__ ProductArgs args) {
  using A = Operand<kTileRows, kAcrossA>;
  using B = Operand<kTileColumns, kAcrossB>;
  __shared__ alignas(16) typename A::Tile tiles_a[kTileStages];
  __shared__ alignas(16) typename B::Tile tiles_b[kTileStages];
  const TilePlace place(args);
  const ProductArgs::Side& side = args.of[blockIdx.z];
  Operands<A, B, kTwo> operands(args, place);
  const auto load = [&](int stage) { operands.load(tiles_a[stage], tiles_b[stage]); };

  float sum[kDown][kSide][4] = {};
  const bool sums = kAcrossA && args.sums && place.makes_sums();
  float row_sum = 0;
  walk_depth(operands.steps(), load, [&](int stage) {
    const uint16_t *tile_a = tiles_a[stage], *tile_b = tiles_b[stage];
    if (sums) {
      const S* column = reinterpret_cast<const S*>(tile_a) + threadIdx.x;
#pragma unroll 8
      for (int k = 0; k < kTileDepth; ++k) row_sum += to_arithmetic(column[k * A::kStride]);
    }
    narrow::multiply_tiles<S, A, B>(tile_a, tile_b, place, sum);
  });

  if (sums && place.first_row + threadIdx.x < args.rows) {
    args.sums[blockIdx.y * args.c_share + place.first_row + threadIdx.x] = row_sum;
  }
  const S* bias = static_cast<const S*>(args.bias);
  for_each_pair(place, place.first_row, args.rows, place.first_column, args.columns, sum,
                [&](int64_t row, int column, float x, float y) {
                  if (bias) x += to_arithmetic(bias[column]), y += to_arithmetic(bias[column + 1]);
                  const int64_t at = blockIdx.y * args.c_share + row * side.c_row + column;
                  if (args.wide) {
                    store_pair(args, static_cast<float*>(side.c) + at, x, y);
                  } else {
                    store_pair(args, static_cast<S*>(side.c) + at, x, y);
                  }
                });
}

template <class S, bool kAcrossA, bool kAcrossB, bool kTwo = false>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  narrow_product_kernel<S, kAcrossA, kAcrossB, kTwo><<<product_grid(args), kProductThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch(bool across_a, bool across_b, const ProductArgs& args, cudaStream_t stream) {
  if (across_a) return across_b ? launch<S, true, true>(args, stream) : cudaErrorInvalidValue;
  if (args.more.a) return across_b ? cudaErrorInvalidValue : launch<S, false, false, true>(args, stream);
  return across_b ? launch<S, false, true>(args, stream) : launch<S, false, false>(args, stream);
}

}  // namespace

cudaError_t run_narrow_product(Storage storage, bool across_a, bool across_b, const ProductArgs& args,
                               cudaStream_t stream) {
  switch (storage) {
    case Storage::f16: return launch<__half>(across_a, across_b, args, stream);
    case Storage::bf16: return launch<__nv_bfloat16>(across_a, across_b, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace edgeless::cuda::maps
