// What NVRTC declares of CUDA, as far as generated kernels use it, for the compiler of the CPU. A block's threads are
// coroutines (threads.h), so that exchanges between lanes and barriers can wait for all that take part.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

using std::max;
using std::min;

#define __device__
#define __host__
#define __global__ static
#define __forceinline__ inline
#define __shared__ static  // blocks run one after another
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Place {
  unsigned x = 0, y = 0, z = 0;
};
extern Place blockIdx, gridDim, threadIdx;
extern uint4* dynamic_memory;

template <class A, class B>
A bits_as(B x) {
  static_assert(sizeof(A) == sizeof(B));
  A y;
  memcpy(&y, &x, sizeof(x));
  return y;
}
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline double __hiloint2double(uint32_t high, uint32_t low) { return bits_as<double>(uint64_t(high) << 32 | low); }
inline int __double2loint(double x) { return static_cast<int>(bits_as<uint64_t>(x)); }
inline int __double2hiint(double x) { return static_cast<int>(bits_as<uint64_t>(x) >> 32); }
inline uint32_t __byte_perm(uint32_t, uint32_t, uint32_t) { abort(); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T x) {
  *at = x;
}

void __syncthreads();
// Waits for the lanes of `mask`, and returns what the lanes of the warp have given.
const uint64_t* meet(unsigned mask, uint64_t given);

template <class T>
uint64_t packed(T x) {
  uint64_t y = 0;
  memcpy(&y, &x, sizeof(x));
  return y;
}
template <class T>
T unpacked(uint64_t x) {
  T y;
  memcpy(&y, &x, sizeof(y));
  return y;
}
template <class T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  const int first = threadIdx.x % 32 / width * width;
  return unpacked<T>(meet(mask, packed(x))[first + (lane & (width - 1))]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int by) {
  const int other = threadIdx.x % 32 ^ by;
  return unpacked<T>(meet(mask, packed(x))[other]);
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  const uint64_t* all = meet(mask, x);
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= (mask >> lane & 1) && all[lane] ? 1u << lane : 0;
  return found;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == mask; }
inline void __syncwarp() { meet(~0u, 0); }

// mma.m16n8k8 of TF32 values, of which the lowest 13 bits do not count.
inline void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool fresh) {
  uint64_t all[3][32];
  memcpy(all[0], meet(~0u, uint64_t(a[0]) << 32 | a[1]), sizeof(all[0]));
  memcpy(all[1], meet(~0u, uint64_t(a[2]) << 32 | a[3]), sizeof(all[1]));
  memcpy(all[2], meet(~0u, uint64_t(b[0]) << 32 | b[1]), sizeof(all[2]));
  const auto value = [](uint64_t pair, bool second) {
    return double(__uint_as_float(uint32_t(second ? pair : pair >> 32) & 0xffffe000u));
  };
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = fresh ? 0 : c[i];
    for (int k = 0; k < 8; ++k) {
      const uint64_t left = all[k / 4][row % 8 * 4 + k % 4], right = all[2][column * 4 + k % 4];
      sum += value(left, row >= 8) * value(right, k >= 4);
    }
    c[i] = static_cast<float>(sum);
  }
}
