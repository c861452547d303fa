// The best of a lane's numbers so far, the smallest: of maxima the signs are turned round before and after. Each state
// has init(), take(raw, offset, source) and unpack().
//
// NaN wins and stays, but leaves the argument behind: whoever finds one at the end looks for its place again. Equal
// numbers keep the first argument. Where edges share, they are counted. Parallel edges share with each other alone:
// what they get goes to one source, as if there were no others. Single numbers tell that apart from what several
// sources share, so that most multi-graphs take no second look at a row.
#pragma once

#include "../../common/words.cuh"

namespace edgeless::cuda::extrema {

template <class S>
constexpr uint32_t kSigns = sizeof(S) == 2 ? 0x80008000u : 0x80000000u;

template <class S>
__device__ __forceinline__ Words<4> turn_signs(Words<4> raw, bool turn) {
  const uint32_t mask = turn ? kSigns<S> : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (sizeof(S) < 8 || i % 2) raw.w[i] ^= mask;  // of a double the upper word
  }
  return raw;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ __forceinline__ double min_or_nan(double a, double b) { return a != a || a <= b ? a : b; }

template <class S, class I, bool kShares>
struct Best {
  using A = Arithmetic<S>;
  static constexpr int kPer = kNumbers<S, 4>;
  static constexpr bool kSources = kShares;  // whether it tells them apart
  A best[kPer];
  int at[kPer], count[kShares ? kPer : 1];
  I source[kShares ? kPer : 1];  // of the argument
  uint32_t several;              // bit k: other sources share; may be set where none does

  __device__ __forceinline__ void init() {
    several = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      best[k] = INFINITY, at[k] = 0;
      if constexpr (kShares) count[k] = 0, source[k] = -1;
    }
  }

  __device__ __forceinline__ void take(const Words<4>& raw, int offset, I from) {
    A x[kPer];
    unpack_words<S, 4>(raw, x);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const bool less = x[k] < best[k];
      if constexpr (kShares) {
        const bool same = x[k] == best[k];
        count[k] = less ? 1 : count[k] + same;
        if (less) several &= ~(1u << k);
        if (same && source[k] != from) several |= 1u << k;
        source[k] = less ? from : source[k];
      }
      at[k] = less ? offset : at[k];
      best[k] = min_or_nan(best[k], x[k]);
    }
  }

  __device__ __forceinline__ void unpack(A (&to)[kPer], int (&to_at)[kPer], int (&to_count)[kPer]) const {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      to[k] = best[k], to_at[k] = at[k];
      to_count[k] = kShares ? count[kShares ? k : 0] : 0;
    }
  }
};

// Two numbers a word, and two arguments and counts of 16 bits: half the instructions.
template <class S, class S2, bool kShares>
struct PackedBest {
  static constexpr int kPer = 8;
  static constexpr bool kSources = false;
  uint32_t best[4], at[4], count[kShares ? 4 : 1];

  static __device__ __forceinline__ S2 pair(uint32_t word) { return *reinterpret_cast<const S2*>(&word); }
  static __device__ __forceinline__ uint32_t word(S2 x) { return *reinterpret_cast<const uint32_t*>(&x); }

  __device__ __forceinline__ void init() {
    const uint32_t infinity = std::is_same_v<S, __half> ? 0x7c007c00u : 0x7f807f80u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      best[i] = infinity, at[i] = 0;
      if constexpr (kShares) count[i] = 0;
    }
  }

  template <class I>
  __device__ __forceinline__ void take(const Words<4>& raw, int offset, I) {
    const uint32_t here = static_cast<uint32_t>(offset) * 0x10001u, one = 0x10001u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const S2 x = pair(raw.w[i]), old = pair(best[i]);
      const uint32_t less = __hlt2_mask(x, old);
      if constexpr (kShares) {
        const uint32_t more = count[i] + (__heq2_mask(x, old) & one);
        count[i] = (more & ~less) | (one & less);
      }
      at[i] = (at[i] & ~less) | (here & less);
      best[i] = word(__hmin2_nan(x, old));
    }
  }

  __device__ __forceinline__ void unpack(float (&to)[8], int (&to_at)[8], int (&to_count)[8]) const {
    Words<4> raw;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      raw.w[i] = best[i];
      to_at[2 * i] = at[i] & 0xffff, to_at[2 * i + 1] = at[i] >> 16;
      const uint32_t counts = kShares ? count[kShares ? i : 0] : 0;
      to_count[2 * i] = counts & 0xffff, to_count[2 * i + 1] = counts >> 16;
    }
    unpack_words<S, 4>(raw, to);
  }
};

template <class I, bool kShares>
struct Best<__half, I, kShares> : PackedBest<__half, __half2, kShares> {};
template <class I, bool kShares>
struct Best<__nv_bfloat16, I, kShares> : PackedBest<__nv_bfloat16, __nv_bfloat162, kShares> {};

}  // namespace edgeless::cuda::extrema
