// float32 products on tensor cores: each factor is split into two TF32 values, the nearest one and the remainder. The
// product of the two remainders may be omitted; the result is still as accurate as float32 arithmetic. TF32 holds
// 16-bit values exactly. No torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

__device__ __forceinline__ void split(float x, uint32_t& nearest, uint32_t& rest) {
  nearest = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  rest = __float_as_uint(x - __uint_as_float(nearest));  // mma ignores the lowest 13 bits
}

// c = a b if `fresh`, else c += a b, for tiles a [16, 8] and b [8, 8].
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

// part += a b, or part = a b if `fresh`, for a warp's kDown by kSides tiles, from the TF32 parts of both factors: [0]
// the nearest values, [1] the remainders. The small products come first. Consecutive mma have different accumulators,
// so they do not depend on each other.
template <int kDown, int kSides>
__device__ __forceinline__ void multiply_parts(float (&part)[kDown][kSides][4], const uint32_t (&a)[2][kDown][4],
                                               const uint32_t (&b)[2][kSides][2], bool fresh) {
#pragma unroll
  for (int product = 0; product < 3; ++product) {
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kSides; ++j) {
        multiply_add(part[i][j], a[product == 0][i], b[product == 1][j], fresh && product == 0);
      }
    }
  }
}

// True if no value is infinite or NaN: split() turns an infinity into NaN. The four sums are independent, for
// instruction-level parallelism.
template <int kRows, int kColumns>
__device__ __forceinline__ bool all_finite(const float (&x)[kRows][kColumns]) {
  float zero[4] = {};
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) zero[i % 4] = fmaf(0, x[i / kColumns][i % kColumns], zero[i % 4]);
  return (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0;
}

}  // namespace edgeless::cuda
