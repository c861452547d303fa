// Products of float32 matrices on tensor cores, as exact as on the other units and up to a fifth faster.
//
// Tensor cores multiply numbers of 11 significant bits (TF32). A float is the nearest of those and what is left, of
// which they take the first 11 bits: three products of the parts leave out less than a rounding of the float32 product.
// What a tensor core adds it rounds towards zero, so sums of 16 products are taken out and added as floats. (Ootomo,
// Yokota: "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
// performance", 2022, sections 3 and 4.)
//
// A block makes 128 by 64 numbers of C, a warp 32 by 32, from three stages of 32 columns of A and B in shared memory.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels.h"
#include "tiles.cuh"

namespace edgeless::cuda::maps {
namespace {

constexpr int kInner = 8, kKept = 16;  // depth of an mma, and of the sums that a tensor core makes

template <int kSize, bool kAcross>
struct Operand : Tiles<float, kSize, kAcross, kAcross ? 8 : 4> {
  using Base = Tiles<float, kSize, kAcross, kAcross ? 8 : 4>;
  using Base::Base, Base::kStride;

  static __device__ __forceinline__ float get(const float* tile, int at, int depth) {
    return tile[kAcross ? depth * kStride + at : at * kStride + depth];
  }
};

constexpr int kStageA = Operand<kTileRows, false>::kNumbers, kStageB = Operand<kTileColumns, false>::kNumbers;
constexpr int kSharedBytes = kTileStages * (kStageA + kStageB) * static_cast<int>(sizeof(float));
static_assert(Operand<kTileRows, true>::kNumbers <= kStageA && Operand<kTileColumns, true>::kNumbers <= kStageB);

__device__ __forceinline__ void split(float x, uint32_t& nearest, uint32_t& rest) {
  nearest = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  rest = __float_as_uint(x - __uint_as_float(nearest)) + 0x1000u;  // of which the lowest 13 bits are not looked at
}

// c = a b, to which c is added where it is not `fresh`.
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             bool fresh) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(fresh ? 0.0f : c[0]),
        "f"(fresh ? 0.0f : c[1]), "f"(fresh ? 0.0f : c[2]), "f"(fresh ? 0.0f : c[3]));
#endif
}

// An infinity leaves no number behind when it is split: a result that is none is made once more, like this.
template <bool kAcrossA, bool kAcrossB>
__device__ __noinline__ float in_floats(const ProductArgs::Pair& pair, int64_t row, int64_t column, int64_t begin,
                                        int64_t end) {
  const float *a = static_cast<const float*>(pair.a), *b = static_cast<const float*>(pair.b);
  float x = 0;
  for (int64_t k = begin; k < end; ++k) {
    x = fmaf(a[kAcrossA ? k * pair.a_row + row : row * pair.a_row + k],
             b[kAcrossB ? k * pair.b_row + column : column * pair.b_row + k], x);
  }
  return x;
}

// C = A B^T: A(i, k) and B(j, k), of which either may lie with k as its rows.
template <bool kAcrossA, bool kAcrossB, bool kTwo>
__global__ void __launch_bounds__(kProductThreads, 2) product_kernel(const __grid_constant__ ProductArgs args) {
  extern __shared__ float4 memory[];
  float* shared = reinterpret_cast<float*>(memory);
  using A = Operand<kTileRows, kAcrossA>;
  using B = Operand<kTileColumns, kAcrossB>;
  const TilePlace place(args);
  Operands<A, B, kTwo> operands(args, place);
  const float* bias = static_cast<const float*>(args.bias);
  const auto stage_a = [&](int stage) { return shared + stage * (kStageA + kStageB); };
  const auto stage_b = [&](int stage) { return stage_a(stage) + kStageA; };
  const auto load = [&](int stage) { operands.load(stage_a(stage), stage_b(stage)); };

  float sum[kDown][kSide][4] = {}, part[kDown][kSide][4];
  const bool sums = kAcrossA && args.sums && place.makes_sums();
  float row_sum = 0;
  walk_depth(operands.steps(), load, [&](int stage) {
    const float *tile_a = stage_a(stage), *tile_b = stage_b(stage);
    if (sums) {
#pragma unroll 8
      for (int k = 0; k < kTileDepth; ++k) row_sum += A::get(tile_a, threadIdx.x, k);
    }
#pragma unroll
    for (int inner = 0; inner < kTileDepth; inner += kInner) {
      uint32_t b_parts[2][kSide][2], a_parts[2][kDown][4];  // the nearest numbers, and what is left
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          split(B::get(tile_b, place.side + j * 8 + place.group, inner + place.in_group + 4 * h), b_parts[0][j][h],
                b_parts[1][j][h]);
        }
      }
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          split(A::get(tile_a, place.down + i * 16 + place.group + h % 2 * 8, inner + place.in_group + h / 2 * 4),
                a_parts[0][i][h], a_parts[1][i][h]);
        }
      }
      // The small products first; those that follow each other do not wait for each other.
#pragma unroll
      for (int product = 0; product < 3; ++product) {
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            multiply_add(part[i][j], a_parts[product == 0][i], b_parts[product == 1][j],
                         product == 0 && inner % kKept == 0);
          }
        }
      }
      if (inner % kKept == kKept - kInner) {
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
#pragma unroll
            for (int h = 0; h < 4; ++h) sum[i][j][h] += part[i][j][h];
          }
        }
      }
    }
  });

  if (sums && place.first_row + threadIdx.x < args.rows) {
    args.sums[blockIdx.y * args.c_share + place.first_row + threadIdx.x] = row_sum;
  }
  float* c = static_cast<float*>(args.of[blockIdx.z].c) + blockIdx.y * args.c_share;
  const int64_t c_row = args.of[blockIdx.z].c_row;
  const auto again = [&](int64_t row, int column) {
    const ProductArgs::Pair pair{args.a, args.of[blockIdx.z].b, args.a_row, args.of[blockIdx.z].b_row, args.depth};
    const float x = in_floats<kAcrossA, kAcrossB>(pair, row, column, place.begin, place.end);
    return kTwo ? x + in_floats<kAcrossA, kAcrossB>(args.more, row, column, 0, args.more.depth) : x;
  };
  for_each_pair(args, place, sum, [&](int64_t row, int column, float x, float y) {
    if (!isfinite(x)) x = again(row, column);
    if (!isfinite(y)) y = again(row, column + 1);
    if (bias) x += bias[column], y += bias[column + 1];
    float2* to = reinterpret_cast<float2*>(c + row * c_row + column);
    if (args.add) x += to->x, y += to->y;
    *to = make_float2(x, y);
  });
}

// Lets a kernel take its shared memory on the current device. `done` remembers the first devices for which it was said:
// to say it takes a third of a launch.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, std::atomic<uint64_t>& done) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (failed == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return failed;
}

template <bool kAcrossA, bool kAcrossB, bool kTwo = false>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const auto kernel = product_kernel<kAcrossA, kAcrossB, kTwo>;
  const cudaError_t error = allow_shared_memory(kernel, done);
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

cudaError_t run_product(bool across_a, bool across_b, const ProductArgs& args, cudaStream_t stream) {
  if (across_a) return across_b ? launch<true, true>(args, stream) : cudaErrorInvalidValue;
  if (args.more.a) return across_b ? cudaErrorInvalidValue : launch<false, false, true>(args, stream);
  return across_b ? launch<false, true>(args, stream) : launch<false, false>(args, stream);
}

}  // namespace edgeless::cuda::maps
