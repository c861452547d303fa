// The inner loops over a chunk of gathered rows, shared by every score and pass. Included once per instruction set.
//
// A chunk is n <= kChunk edges; `rows` points to their padded rows [H, padded] and is filled up to a multiple of four
// by repeating the last pointer. Values per edge and head are head-major, [H, kChunk]. NV is the number of vectors per
// head, or 0 if it is known only at run time. `prefetch` is called about once per edge and prefetches a row of a later
// edge.

struct PrefetchNothing {
  void operator()() const {}
};

// s[h, e] = alpha * <own_h, rows[e]_h>
template <class A, int NV, class Prefetch = PrefetchNothing>
static inline void dots(const A* own, const A* const* rows, int64_t n, int64_t heads, int64_t padded, A alpha, A* s,
                        Prefetch prefetch = {}) {
  constexpr int64_t W = kWidth<A>;
  const int64_t vectors = NV ? NV : padded / W;
  for (int64_t e = 0; e < n; e += 4) {
    const A *r0 = rows[e], *r1 = rows[e + 1], *r2 = rows[e + 2], *r3 = rows[e + 3];
    for (int64_t h = heads; h < 4; ++h) prefetch();
    for (int64_t h = 0; h < heads; ++h) {
      if (h < 4) prefetch();
      Vec<A> t[4] = {};
#pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t at = h * padded + v * W;
        const Vec<A> o = load(own + at);
        t[0] += o * load(r0 + at);
        t[1] += o * load(r1 + at);
        t[2] += o * load(r2 + at);
        t[3] += o * load(r3 + at);
      }
      A four[4];
      sum4<A>(t, four);
      for (int i = 0; i < 4; ++i) s[h * kChunk + e + i] = alpha * four[i];
    }
  }
}

// s[h, e] = alpha * <a[e]_h, b[e]_h>, bitwise as dots() computes it
template <class A, int NV>
static inline void dots_of_pairs(const A* const* a, const A* const* b, int64_t n, int64_t heads, int64_t padded,
                                 A alpha, A* s) {
  constexpr int64_t W = kWidth<A>;
  const int64_t vectors = NV ? NV : padded / W;
  for (int64_t e = 0; e < n; e += 4) {
    for (int64_t h = 0; h < heads; ++h) {
      Vec<A> t[4] = {};
      for (int i = 0; i < 4; ++i) {
        for (int64_t v = 0; v < vectors; ++v) {
          const int64_t at = h * padded + v * W;
          t[i] += load(a[e + i] + at) * load(b[e + i] + at);
        }
      }
      A four[4];
      sum4<A>(t, four);
      for (int i = 0; i < 4; ++i) s[h * kChunk + e + i] = alpha * four[i];
    }
  }
}

// acc_h += sum over e of alpha * w[h, e] * rows[e]_h, with NV vectors of each of HB heads in registers.
template <class A, int HB, int NV, class Prefetch>
static inline void accumulate_block(const A* w, const A* const* rows, int64_t n, int64_t h, int64_t padded,
                                    int64_t first, A alpha, A* acc, Prefetch prefetch) {
  constexpr int64_t W = kWidth<A>;
  Vec<A> t[HB * NV] = {};
  for (int64_t e = 0; e < n; ++e) {
    const A* row = rows[e] + h * padded + first;
    prefetch();
#pragma GCC unroll 8
    for (int b = 0; b < HB; ++b) {
      const Vec<A> x = splat<A>(w[(h + b) * kChunk + e]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) t[b * NV + v] += x * load(row + b * padded + v * W);
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < HB; ++b) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      A* out = acc + (h + b) * padded + first + v * W;
      store(out, load(out) + alpha * t[b * NV + v]);
    }
  }
}

template <class A, int HB, int NV, class Prefetch>
static inline int64_t accumulate_heads(const A* w, const A* const* rows, int64_t n, int64_t h, int64_t heads,
                                       int64_t padded, A alpha, A* acc, Prefetch prefetch) {
  for (; h + HB <= heads; h += HB) accumulate_block<A, HB, NV>(w, rows, n, h, padded, 0, alpha, acc, prefetch);
  if constexpr (HB > 1) {
    return accumulate_heads<A, HB / 2, NV>(w, rows, n, h, heads, padded, alpha, acc, prefetch);
  } else {
    return h;
  }
}

template <class A, int NV, class Prefetch = PrefetchNothing>
static inline void accumulate(const A* w, const A* const* rows, int64_t n, int64_t heads, int64_t padded, A alpha,
                              A* acc, Prefetch prefetch = {}) {
  constexpr int64_t W = kWidth<A>;
  if constexpr (NV > 0) {
    accumulate_heads<A, 8 / NV, NV>(w, rows, n, 0, heads, padded, alpha, acc, prefetch);
  } else {
    for (int64_t h = 0; h < heads; ++h) {
      int64_t at = 0;
      for (; at + 4 * W <= padded; at += 4 * W)
        accumulate_block<A, 1, 4>(w, rows, n, h, padded, at, alpha, acc, prefetch);
      for (; at < padded; at += W) accumulate_block<A, 1, 1>(w, rows, n, h, padded, at, alpha, acc, prefetch);
    }
  }
}

// out[h, e] = rows[e][h] for heads [first, first + 4); rows are filled up to a multiple of four.
template <class A>
static inline void four_heads(const A* const* rows, int64_t n, int64_t first, A* out) {
  for (int64_t e = 0; e < n; ++e) {
    for (int64_t i = 0; i < 4; ++i) out[i * kChunk + e] = rows[e][first + i];
  }
}

#if EDGELESS_X86
template <>
inline void four_heads<float>(const float* const* rows, int64_t n, int64_t first, float* out) {
  for (int64_t e = 0; e < n; e += 4) {
    __m128 a = _mm_loadu_ps(rows[e] + first), b = _mm_loadu_ps(rows[e + 1] + first);
    __m128 c = _mm_loadu_ps(rows[e + 2] + first), d = _mm_loadu_ps(rows[e + 3] + first);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out + e, a);
    _mm_storeu_ps(out + kChunk + e, b);
    _mm_storeu_ps(out + 2 * kChunk + e, c);
    _mm_storeu_ps(out + 3 * kChunk + e, d);
  }
}
#endif

// out[h, e] = rows[e][h]: gathers values per node to values per edge, head-major.
template <class A>
static inline void spread_heads(const A* const* rows, int64_t n, int64_t heads, A* out) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) four_heads(rows, n, h, out + h * kChunk);
  for (; h < heads; ++h) {
    for (int64_t e = 0; e < n; ++e) out[h * kChunk + e] = rows[e][h];
  }
}
