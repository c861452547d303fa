// Vectors of one, two or four 4-byte words, and packing of values into them. No torch.
#pragma once

#include "vec.cuh"

namespace edgeless::cuda {

template <int kCount>
struct alignas(4 * kCount) Words {
  uint32_t w[kCount];
};

// Values of storage type S in kCount words; a double needs two words.
template <class S, int kCount>
constexpr int kNumbers = 4 * kCount / static_cast<int>(sizeof(S));

__device__ __forceinline__ Words<4> load_shared_words(const Words<4>* at) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(at));
  return {{raw.x, raw.y, raw.z, raw.w}};
}
__device__ __forceinline__ Words<2> load_shared_words(const Words<2>* at) {
  const uint2 raw = __ldg(reinterpret_cast<const uint2*>(at));
  return {{raw.x, raw.y}};
}
__device__ __forceinline__ Words<1> load_shared_words(const Words<1>* at) {
  return {{__ldg(reinterpret_cast<const uint32_t*>(at))}};
}

__device__ __forceinline__ Words<4> load_words_once(const Words<4>* at) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(at));
  return {{raw.x, raw.y, raw.z, raw.w}};
}
__device__ __forceinline__ Words<2> load_words_once(const Words<2>* at) {
  const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(at));
  return {{raw.x, raw.y}};
}
__device__ __forceinline__ Words<1> load_words_once(const Words<1>* at) {
  return {{__ldcs(reinterpret_cast<const uint32_t*>(at))}};
}

__device__ __forceinline__ void store_words_once(void* at, const Words<4>& x) {
  __stcs(static_cast<uint4*>(at), make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]));
}
__device__ __forceinline__ void store_words_once(void* at, const Words<2>& x) {
  __stcs(static_cast<uint2*>(at), make_uint2(x.w[0], x.w[1]));
}
__device__ __forceinline__ void store_words_once(void* at, const Words<1>& x) {
  __stcs(static_cast<uint32_t*>(at), x.w[0]);
}

template <class S, int kCount>
__device__ __forceinline__ void unpack_words(const Words<kCount>& raw, Arithmetic<S> (&x)[kNumbers<S, kCount>]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<S, float>) {
      x[i] = __uint_as_float(raw.w[i]);
    } else if constexpr (std::is_same_v<S, double>) {
      if (i % 2) x[i / 2] = __hiloint2double(raw.w[i], raw.w[i - 1]);
    } else if constexpr (std::is_same_v<S, __nv_bfloat16>) {
      x[2 * i] = __uint_as_float(raw.w[i] << 16);
      x[2 * i + 1] = __uint_as_float(raw.w[i] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&raw.w[i]));
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}

template <class S, int kCount>
__device__ __forceinline__ Words<kCount> pack_words(const Arithmetic<S> (&x)[kNumbers<S, kCount>]) {
  Words<kCount> raw;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<S, float>) {
      raw.w[i] = __float_as_uint(x[i]);
    } else if constexpr (std::is_same_v<S, double>) {
      raw.w[i] = i % 2 ? __double2hiint(x[i / 2]) : __double2loint(x[i / 2]);
    } else if constexpr (std::is_same_v<S, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      raw.w[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      raw.w[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return raw;
}

// Stores a lane's values to a contiguous row of `size` values, from index `at` on. whole: rows consist of whole
// vectors.
template <class S, int kCount>
__device__ __forceinline__ void store_numbers(S* row, int at, int size, bool whole,
                                              const Arithmetic<S> (&x)[kNumbers<S, kCount>]) {
  if (whole) {
    store_words_once(row + at, pack_words<S, kCount>(x));
    return;
  }
#pragma unroll
  for (int k = 0; k < kNumbers<S, kCount>; ++k) {
    if (at + k < size) row[at + k] = to_storage<S>(x[k]);
  }
}

// base + index * stride, with the stride in bytes.
__device__ __forceinline__ const char* row_address(const char* base, int32_t index, uint32_t stride) {
  const char* address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(index), "r"(stride), "l"(base));
  return address;
}
__device__ __forceinline__ const char* row_address(const char* base, int64_t index, uint32_t stride) {
  return base + static_cast<uint64_t>(index) * stride;
}

}  // namespace edgeless::cuda
