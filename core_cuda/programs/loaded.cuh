// Loads and stores of contiguous values in generated walks.
#pragma once

#include "../common/vec.cuh"

namespace edgeless::cuda::programs {

constexpr int power_of_two_in(int n, int most) {
  int found = 1;
  while (found < most && n % (2 * found) == 0) found *= 2;
  return found;
}

template <int kBytes>
using ChunkOf = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

// kCount contiguous values, loaded with as few instructions as their alignment allows: rows begin at multiples of
// kCount values.
template <class S, int kCount>
struct Loaded {
  static constexpr int kBytes = power_of_two_in(kCount * sizeof(S), 16), kChunks = kCount * sizeof(S) / kBytes;
  using Chunk = ChunkOf<kBytes>;
  Chunk chunk[kChunks];

  // Loads from a row that many edges gather.
  __device__ __forceinline__ void gather(const S* at) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunk[i] = __ldg(reinterpret_cast<const Chunk*>(at) + i);
  }
  // Loads from a row that is read once.
  __device__ __forceinline__ void once(const S* at) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunk[i] = __ldcs(reinterpret_cast<const Chunk*>(at) + i);
  }
  // Loads from shared memory.
  __device__ __forceinline__ void near(const S* at) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunk[i] = reinterpret_cast<const Chunk*>(at)[i];
  }
  // Loads from a copy for `lanes` lanes in which the chunks of neighbouring lanes are contiguous (copy_spread()).
  __device__ __forceinline__ void spread(const char* copy, int lanes, int lane) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunk[i] = reinterpret_cast<const Chunk*>(copy)[i * lanes + lane];
  }
  __device__ __forceinline__ S operator[](int k) const {
    constexpr int kOfChunk = kBytes / sizeof(S);
    S some[kOfChunk];
    memcpy(some, chunk + k / kOfChunk, kBytes);
    return some[k % kOfChunk];
  }
};

template <class S, int kCount>
__device__ __forceinline__ void store_values(S* at, const S (&x)[kCount]) {
  Loaded<S, kCount> packed;
  memcpy(packed.chunk, x, sizeof(x));
#pragma unroll
  for (int i = 0; i < packed.kChunks; ++i) {
    __stcs(reinterpret_cast<typename Loaded<S, kCount>::Chunk*>(at) + i, packed.chunk[i]);
  }
}

// Stores contiguous values to shared memory.
template <class S, int kCount>
__device__ __forceinline__ void keep_values(S* at, const S (&x)[kCount]) {
  Loaded<S, kCount> packed;
  memcpy(packed.chunk, x, sizeof(x));
#pragma unroll
  for (int i = 0; i < packed.kChunks; ++i) {
    reinterpret_cast<typename Loaded<S, kCount>::Chunk*>(at)[i] = packed.chunk[i];
  }
}

template <class S>
constexpr bool is_sixteen_bits = std::is_same_v<S, __nv_bfloat16> || std::is_same_v<S, __half>;

// Converts a value for arithmetic: 16-bit floats to float; all others stay as they are.
template <class S>
__device__ __forceinline__ auto value_of(S x) {
  if constexpr (is_sixteen_bits<S>) {
    return to_arithmetic(x);
  } else {
    return x;
  }
}

template <class S, class A>
__device__ __forceinline__ S stored(A x) {
  if constexpr (is_sixteen_bits<S>) {
    return to_storage<S>(static_cast<float>(x));
  } else {
    return static_cast<S>(x);
  }
}

}  // namespace edgeless::cuda::programs
