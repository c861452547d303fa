// Vectors of 16 or 8 bytes: loads, stores, and conversion between storage and opmath types. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace edgeless::cuda {

// The opmath type, also that of statistics: double for double rows, float for all others.
template <class S>
using Arithmetic = std::conditional_t<std::is_same_v<S, double>, double, float>;

// Tags a 16-bit type N whose rows are loaded as 8-byte vectors: rows that would leave half of a 16-byte vector empty
// (see Storage).
template <class N>
struct OfFour {
  N number;
};

// kVec: values per vector. Raw: the vector as it is loaded.
template <class S>
constexpr int kVec = 16 / sizeof(S);
template <class N>
constexpr int kVec<OfFour<N>> = 4;
template <class S>
using Raw = std::conditional_t<kVec<S> * sizeof(S) == 8, uint2, uint4>;

__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[4], float) {
  x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
  x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[8], __nv_bfloat16) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[8], __half) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

template <class N>
__device__ __forceinline__ void unpack(const uint2& raw, float (&x)[4], OfFour<N>) {
  float all[8];
  unpack(uint4{raw.x, raw.y, 0, 0}, all, N{});
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = all[k];
}

__device__ __forceinline__ void unpack(const uint4& raw, double (&x)[2], double) {
  x[0] = __hiloint2double(raw.y, raw.x), x[1] = __hiloint2double(raw.w, raw.z);
}

// Unpacks the same values again. With kOther it uses other instructions, so that the compiler cannot reuse the first
// result and keep it in registers; the values are then converted twice, which is profitable only where registers are
// scarce (0054).
template <class S, bool kOther, int kSize>
__device__ __forceinline__ void unpack_again(const uint4& raw, Arithmetic<S> (&x)[kSize]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  if constexpr (kOther && std::is_same_v<S, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(__byte_perm(words[i], 0, 0x1044));
      x[2 * i + 1] = __uint_as_float(__byte_perm(words[i], 0, 0x3244));
    }
  } else if constexpr (kOther && std::is_same_v<S, __half>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // minus the negative: both signs are free operand modifiers
      const float2 minus = __half22float2(__hneg2(*reinterpret_cast<const __half2*>(&words[i])));
      x[2 * i] = -minus.x, x[2 * i + 1] = -minus.y;
    }
  } else {
    unpack(raw, x, S{});
  }
}

template <class S, bool kOther>
__device__ __forceinline__ void unpack_again(const uint2& raw, float (&x)[4]) {
  float all[8];
  unpack_again<decltype(S::number), kOther>(uint4{raw.x, raw.y, 0, 0}, all);
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = all[k];
}

__device__ __forceinline__ uint4 pack(const float (&x)[4], float) {
  return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}

__device__ __forceinline__ uint4 pack(const float (&x)[8], __nv_bfloat16) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ uint4 pack(const float (&x)[8], __half) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

template <class N>
__device__ __forceinline__ uint2 pack(const float (&x)[4], OfFour<N>) {
  const float all[8] = {x[0], x[1], x[2], x[3]};
  const uint4 packed = pack(all, N{});
  return {packed.x, packed.y};
}

__device__ __forceinline__ uint4 pack(const double (&x)[2], double) {
  return {static_cast<uint32_t>(__double2loint(x[0])), static_cast<uint32_t>(__double2hiint(x[0])),
          static_cast<uint32_t>(__double2loint(x[1])), static_cast<uint32_t>(__double2hiint(x[1]))};
}

// Cache policy: *_shared_* for rows that many edges gather, which should stay in L2; *_once for rows that are read or
// written once, which are evicted first. R: the vector type.
template <class R = uint4>
__device__ __forceinline__ R load_shared_row(const char* at) {
  return __ldg(reinterpret_cast<const R*>(at));
}
// Like load_shared_row(), where the next instructions read the rest of the 128-byte line: prefetches the line to L2.
__device__ __forceinline__ uint4 load_shared_line(const char* at) {
  uint4 raw;
  asm("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
      : "l"(at));
  return raw;
}
template <class R = uint4>
__device__ __forceinline__ R load_once(const char* at) {
  return __ldcs(reinterpret_cast<const R*>(at));
}
__device__ __forceinline__ void store_once(char* at, const uint4& raw) { __stcs(reinterpret_cast<uint4*>(at), raw); }
__device__ __forceinline__ void store_once(char* at, const uint2& raw) { __stcs(reinterpret_cast<uint2*>(at), raw); }

__device__ __forceinline__ float to_arithmetic(float x) { return x; }
__device__ __forceinline__ float to_arithmetic(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_arithmetic(__half x) { return __half2float(x); }
__device__ __forceinline__ double to_arithmetic(double x) { return x; }
template <class N>
__device__ __forceinline__ float to_arithmetic(OfFour<N> x) {
  return to_arithmetic(x.number);
}

template <class S>
__device__ __forceinline__ S to_storage(Arithmetic<S> x) {
  if constexpr (std::is_same_v<S, __nv_bfloat16>) return __float2bfloat16_rn(x);
  if constexpr (std::is_same_v<S, __half>) return __float2half_rn(x);
  if constexpr (std::is_same_v<S, OfFour<__nv_bfloat16>>) return {to_storage<__nv_bfloat16>(x)};
  if constexpr (std::is_same_v<S, OfFour<__half>>) return {to_storage<__half>(x)};
  if constexpr (std::is_same_v<S, Arithmetic<S>>) return x;
}

// The softmax is computed in base 2; the factor log2(e) is folded into the logits.
constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }

// Fast approximations for the sum of a softmax, which is at least 1 unless it is 0 or NaN.
__device__ __forceinline__ float log_base_two(float x) { return __log2f(x); }
__device__ __forceinline__ double log_base_two(double x) { return log2(x); }
__device__ __forceinline__ float reciprocal(float x) { return __fdividef(1.0f, x); }
__device__ __forceinline__ double reciprocal(double x) { return 1 / x; }

}  // namespace edgeless::cuda
