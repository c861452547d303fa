// Products of 16-bit matrices of few rows, summed in floats. The libraries' are as fast on the device, but take three
// to eight times as long to launch, which is what counts there.
//
// A block makes 128 by 64 numbers of C, a warp 32 by 32, from three stages of 32 columns of A and B in shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/vec.cuh"
#include "kernels.h"
#include "tiles.cuh"

namespace edgeless::cuda::maps {
namespace {

constexpr int kInner = 16;  // depth of an mma

template <int kSize, bool kAcross>
struct Operand : Tiles<uint16_t, kSize, kAcross, 8> {
  using Base = Tiles<uint16_t, kSize, kAcross, 8>;
  using Base::Base, Base::kStride;
  using Tile = uint16_t[Base::kNumbers];

  // Four blocks of 8 by 8 numbers, as an mma wants them: rows `first` and the eight after them, depths `inner` and the
  // eight after them. depth_first: which of both the second block is further in.
  static __device__ __forceinline__ void get(const uint16_t* tile, int first, int inner, bool depth_first,
                                             uint32_t (&to)[4]) {
    const int lane = threadIdx.x % 32, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
    int at = first + (depth_first ? third : second), depth = inner + (depth_first ? second : third);
    (kAcross ? depth : at) += lane % 8;
#if __CUDA_ARCH__ >= 800
    const uint32_t address = shared_address(tile + (kAcross ? depth * kStride + at : at * kStride + depth));
    if constexpr (kAcross) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(address));
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(address));
    }
#endif
  }
};

template <class S>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

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
#pragma unroll
    for (int inner = 0; inner < kTileDepth; inner += kInner) {
      uint32_t a_parts[kDown][4], b_parts[kSide / 2][4];
#pragma unroll
      for (int i = 0; i < kDown; ++i) A::get(tile_a, place.down + i * 16, inner, false, a_parts[i]);
#pragma unroll
      for (int j = 0; j < kSide / 2; ++j) B::get(tile_b, place.side + j * 16, inner, true, b_parts[j]);
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          multiply_add<S>(sum[i][j], a_parts[i], b_parts[j / 2][j % 2 * 2], b_parts[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  });

  if (sums && place.first_row + threadIdx.x < args.rows) {
    args.sums[blockIdx.y * args.c_share + place.first_row + threadIdx.x] = row_sum;
  }
  const S* bias = static_cast<const S*>(args.bias);
  for_each_pair(args, place, sum, [&](int64_t row, int column, float x, float y) {
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
