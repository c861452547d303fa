// The part of <cuda_bf16.h> that generated kernels use.
#pragma once

#include "emulated.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
