// Loads and stores of shared memory by its 32-bit address: the compiler recomputes the address behind a pointer at
// nearly every use, which takes three instructions. The address is in bytes and a multiple of the size of the access.
// No torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda::relational {

__device__ __forceinline__ void load_shared(uint32_t at, uint32_t (&x)[1]) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[0]) : "r"(at));
}
__device__ __forceinline__ void load_shared(uint32_t at, uint32_t (&x)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
}
__device__ __forceinline__ void load_shared(uint32_t at, uint32_t (&x)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
template <int kCount>
__device__ __forceinline__ void load_shared(uint32_t at, float (&x)[kCount]) {
  uint32_t words[kCount];
  load_shared(at, words);
#pragma unroll
  for (int k = 0; k < kCount; ++k) x[k] = __uint_as_float(words[k]);
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x));
}
__device__ __forceinline__ void store_shared(uint32_t at, const float (&x)[1]) {
  store_shared(at, __float_as_uint(x[0]));
}
__device__ __forceinline__ void store_shared(uint32_t at, const float (&x)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x[0]), "f"(x[1]));
}
__device__ __forceinline__ void store_shared(uint32_t at, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
}

// Starts an asynchronous copy (cp.async) of 16 bytes from global memory.
__device__ __forceinline__ void copy_shared(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
#endif
}

// The same; writes zeros if not `there`.
__device__ __forceinline__ void copy_shared(uint32_t to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
#endif
}

// Returns x through a shuffle, so that the compiler does not recompute it at each use. To be called by the whole warp.
template <class T>
__device__ __forceinline__ T in_register(T x) {
  return __shfl_sync(0xffffffffu, x, threadIdx.x % 32);
}

}  // namespace edgeless::cuda::relational
