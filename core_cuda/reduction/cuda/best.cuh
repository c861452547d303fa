// The running minimum or, with kMax, maximum of each of a lane's elements. Each state has init(), take(raw, offset,
// source) and unpack().
//
// NaN beats every number but does not update the argument: a caller that finds one at the end searches its position.
// Equal values keep the first argument. With kShares, ties are counted. Ties among parallel edges need no division,
// because all shares go to one source. `Best` distinguishes them from ties of several sources (PackedBest does not), so
// that most multigraphs need no second pass over a row.
#pragma once

#include "../../common/segment_reduce.h"
#include "../../common/words.cuh"

namespace edgeless::cuda::reduction {

template <bool kMax, class A>
__device__ __forceinline__ bool is_better(A x, A best) {
  return kMax ? x > best : x < best;
}

template <bool kMax>
__device__ __forceinline__ float better_or_nan(float a, float b) {
  float better;
  if constexpr (kMax) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(better) : "f"(a), "f"(b));
  } else {
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(better) : "f"(a), "f"(b));
  }
  return better;
}
template <bool kMax>
__device__ __forceinline__ double better_or_nan(double a, double b) {
  return a != a || a == b || is_better<kMax>(a, b) ? a : b;
}

// A count has, in its lower half, the number of edges with the extremum and, in its upper half, the number of those
// edges whose source is not that of the first one.
constexpr int kOther = 1 << 16;
static_assert(kMostSegment < kOther, "a row, or the segment of one, is shorter");

// Processes one more element. Written in PTX, because these instructions bound the kernel: comparisons and selections
// run on a pipe of half the rate. Therefore the values stored beside the extremum are updated as old * 0 + new by
// predicated multiply-adds on the other pipe. `zero` and `one` are kernel arguments, because with constants the
// compiler would emit selections.
struct Unknown {
  int zero, one;
};

#define EDGELESS_TAKE(BETTER, LIMIT)                                        \
  asm("{.reg .pred better;\n setp." BETTER                                  \
      ".f32 better, %2, %0;\n"                                              \
      "@better mad.lo.s32 %1, %1, %4, %3;\n " LIMIT ".NaN.f32 %0, %0, %2;}" \
      : "+f"(best), "+r"(at)                                                \
      : "f"(x), "r"(offset), "r"(is.zero))
#define EDGELESS_TAKE_SHARED(BETTER, LIMIT)                                       \
  asm("{.reg .pred better, same, other;\n setp." BETTER                           \
      ".f32 better, %4, %0;\n"                                                    \
      "setp.eq.f32 same, %4, %0;\n setp.ne.and.s32 other, %3, %6, same;\n"        \
      "@same mad.lo.s32 %2, %8, %8, %2;\n @other mad.lo.s32 %2, %8, 65536, %2;\n" \
      "@better mad.lo.s32 %1, %1, %7, %5;\n @better mad.lo.s32 %2, %2, %7, 1;\n"  \
      "@better mad.lo.s32 %3, %3, %7, %6;\n " LIMIT ".NaN.f32 %0, %0, %4;}"       \
      : "+f"(best), "+r"(at), "+r"(count), "+r"(source)                           \
      : "f"(x), "r"(offset), "r"(from), "r"(is.zero), "r"(is.one))

template <bool kMax>
__device__ __forceinline__ void take_one(float x, int offset, float& best, int& at, Unknown is) {
  if constexpr (kMax) {
    EDGELESS_TAKE("gt", "max");
  } else {
    EDGELESS_TAKE("lt", "min");
  }
}

template <bool kMax>
__device__ __forceinline__ void take_one(double x, int offset, double& best, int& at, Unknown) {
  at = is_better<kMax>(x, best) ? offset : at;
  best = better_or_nan<kMax>(best, x);
}

template <bool kMax>
__device__ __forceinline__ void take_shared(float x, int offset, int from, float& best, int& at, int& count,
                                            int& source, Unknown is) {
  if constexpr (kMax) {
    EDGELESS_TAKE_SHARED("gt", "max");
  } else {
    EDGELESS_TAKE_SHARED("lt", "min");
  }
}
#undef EDGELESS_TAKE
#undef EDGELESS_TAKE_SHARED

template <bool kMax, class A, class I>
__device__ __forceinline__ void take_shared(A x, int offset, I from, A& best, int& at, int& count, I& source, Unknown) {
  const bool better = is_better<kMax>(x, best);
  if (x == best) count += source == from ? 1 : kOther + 1;
  count = better ? 1 : count;
  source = better ? from : source;
  at = better ? offset : at;
  best = better_or_nan<kMax>(best, x);
}

template <class S, class I, bool kShares, bool kMax>
struct Best {
  using A = Arithmetic<S>;
  static constexpr int kPer = kNumbers<S, 4>;
  static constexpr bool kSources = kShares;  // distinguishes the sources of ties
  A best[kPer];
  int at[kPer], count[kShares ? kPer : 1];
  I source[kShares ? kPer : 1];  // source of the first edge with the extremum

  __device__ __forceinline__ void init() {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      best[k] = kMax ? -INFINITY : INFINITY, at[k] = 0;
      if constexpr (kShares) count[k] = 0, source[k] = -1;
    }
  }

  __device__ __forceinline__ void take(const Words<4>& raw, int offset, I from, Unknown is) {
    A x[kPer];
    unpack_words<S, 4>(raw, x);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if constexpr (kShares) {
        take_shared<kMax>(x[k], offset, from, best[k], at[k], count[k], source[k], is);
      } else {
        take_one<kMax>(x[k], offset, best[k], at[k], is);
      }
    }
  }

  // Returns whether several sources tie for element k.
  __device__ __forceinline__ bool several(int k) const { return static_cast<uint32_t>(count[k]) >= kOther; }

  __device__ __forceinline__ void unpack(A (&to)[kPer], int (&to_at)[kPer], int (&to_count)[kPer]) const {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      to[k] = best[k], to_at[k] = at[k];
      to_count[k] = kShares ? count[kShares ? k : 0] & (kOther - 1) : 0;
    }
  }
};

// Two 16-bit elements per word, with 16-bit arguments and counts: half the instructions.
template <class S, class S2, bool kShares, bool kMax>
struct PackedBest {
  static constexpr int kPer = 8;
  static constexpr bool kSources = false;
  uint32_t best[4], at[4], count[kShares ? 4 : 1];

  static __device__ __forceinline__ S2 pair(uint32_t word) { return *reinterpret_cast<const S2*>(&word); }
  static __device__ __forceinline__ uint32_t word(S2 x) { return *reinterpret_cast<const uint32_t*>(&x); }

  __device__ __forceinline__ void init() {
    constexpr uint32_t kInfinity = std::is_same_v<S, __half> ? 0x7c007c00u : 0x7f807f80u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      best[i] = kMax ? kInfinity | 0x80008000u : kInfinity, at[i] = 0;
      if constexpr (kShares) count[i] = 0;
    }
  }

  template <class I>
  __device__ __forceinline__ void take(const Words<4>& raw, int offset, I, Unknown) {
    const uint32_t here = static_cast<uint32_t>(offset) * 0x10001u, one = 0x10001u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const S2 x = pair(raw.w[i]), old = pair(best[i]);
      const uint32_t better = kMax ? __hgt2_mask(x, old) : __hlt2_mask(x, old);
      if constexpr (kShares) {
        const uint32_t more = count[i] + (__heq2_mask(x, old) & one);
        count[i] = (more & ~better) | (one & better);
      }
      at[i] = (at[i] & ~better) | (here & better);
      best[i] = word(kMax ? __hmax2_nan(x, old) : __hmin2_nan(x, old));
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

template <class I, bool kShares, bool kMax>
struct Best<__half, I, kShares, kMax> : PackedBest<__half, __half2, kShares, kMax> {};
template <class I, bool kShares, bool kMax>
struct Best<__nv_bfloat16, I, kShares, kMax> : PackedBest<__nv_bfloat16, __nv_bfloat162, kShares, kMax> {};

}  // namespace edgeless::cuda::reduction
