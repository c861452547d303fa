// What on_host.h lacks for the kernels of sums over relations of float32 rows, and their launches for a test.
#pragma once

#include <climits>

#define gridDim on_host::grid_
#define blockDim on_host::threads_

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline int atomicAdd(int* at, int x) {
  *at += x;
  return *at - x;
}
inline int __reduce_max_sync(unsigned mask, int x) {
  int most = INT_MIN;
  const auto values = on_host::exchange(mask, &x, sizeof(x));
  for (int lane = 0; lane < 32; ++lane) most = max(most, *reinterpret_cast<const int*>(values[lane]));
  return most;
}

namespace on_host {

inline Place grid_, threads_;

// Addresses in shared memory, of 32 bits: dynamic memory from kDynamic on, static memory around kStatic.
constexpr uint32_t kDynamic = 1u << 28, kStatic = 1u << 31, kMostDynamic = 1u << 20;
inline char anchor;

inline uint32_t shared_address(const void* at) {
  const auto* const byte = static_cast<const char*>(at);
  const int64_t in_dynamic = byte - reinterpret_cast<const char*>(dynamic);
  if (in_dynamic >= 0 && in_dynamic < kMostDynamic) return kDynamic + static_cast<uint32_t>(in_dynamic);
  return kStatic + static_cast<uint32_t>(byte - &anchor);
}

inline void copy(uint32_t to, const void* from, bool there) {
  char* const at = to < 2 * kDynamic ? reinterpret_cast<char*>(dynamic) + (to - kDynamic)
                                     : &anchor + static_cast<int32_t>(to - kStatic);
  there ? memcpy(at, from, 16) : memset(at, 0, 16);
}

}  // namespace on_host
