// Reads and writes rows of any storage type as padded rows of A. Included once per instruction set.

// Rounds to nearest even; NaN stays NaN.
static inline uint16_t bf16_from_float(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float float_from_bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

static inline float float_from_half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
  float x;
  if (exponent == 0) {
    x = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -x : x;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | (mantissa << 13);
  __builtin_memcpy(&x, &bits, 4);
  return x;
#endif
}

static inline uint16_t half_from_float(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // rounds to infinity
  if (magnitude < 0x38800000) {                       // subnormal: let the addition do the rounding
    float shifted;
    __builtin_memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    uint32_t rounded;
    __builtin_memcpy(&rounded, &shifted, 4);
    return sign | static_cast<uint16_t>(rounded - 0x3F000000);
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return sign | static_cast<uint16_t>((magnitude + 0xC8000FFF + odd) >> 13);
#endif
}

// Tags of the 16-bit storage types.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// A vector of elements of type T with as many lanes as a vector of A.
template <class A, class T>
struct LanesOf {
  typedef T type __attribute__((vector_size(kWidth<A> * sizeof(T))));
};
template <class A, class T>
using Lanes = typename LanesOf<A, T>::type;

// The bits of kWidth<float> 16-bit elements. load_first_bits() loads the first n of them and zeros for the others.
typedef Lanes<float, uint16_t> Bits16;

static EDGELESS_INLINE Bits16 load_bits(const void* p) {
  Bits16 bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return bits;
}

static EDGELESS_INLINE Bits16 load_first_bits(const void* p, int64_t n) {
#if EDGELESS_VECTOR_BYTES == 64 && EDGELESS_X86
  return (Bits16)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
#elif EDGELESS_VECTOR_BYTES == 32 && EDGELESS_X86
  // The mask has 32-bit lanes, so it loads pairs, and the last element is inserted.
  const int pairs = static_cast<int>(n / 2);
  const __m128i whole = _mm_maskload_epi32(static_cast<const int*>(p),
                                           _mm_cmpgt_epi32(_mm_set1_epi32(pairs), _mm_setr_epi32(0, 1, 2, 3)));
  const __m128i last = _mm_set1_epi16(static_cast<const int16_t*>(p)[n - 1]);
  const __m128i at =
      _mm_cmpeq_epi16(_mm_set1_epi16(static_cast<int16_t>(n - 1)), _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
  return (Bits16)_mm_blendv_epi8(whole, last, at);
#else
  Bits16 bits = {};
  __builtin_memcpy(&bits, p, n * sizeof(uint16_t));
  return bits;
#endif
}

// Loads kWidth<A> elements of storage type S as a vector of A, or the first n of them and zeros for the others.
template <class A, class S>
struct Stored;

template <class A>
struct Stored<A, A> {
  static EDGELESS_INLINE Vec<A> vector(const A* p) { return load(p); }
  static EDGELESS_INLINE Vec<A> first(const A* p, int64_t n) { return load_first(p, n); }
};

template <>
struct Stored<float, Bf16> {
  static EDGELESS_INLINE Vec<float> of(Bits16 bits) {
#if EDGELESS_VECTOR_BYTES == 64 && EDGELESS_X86  // GCC 12 compiles __builtin_convertvector to four instructions
    const auto wide = (Lanes<float, uint32_t>)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)bits);
#elif EDGELESS_VECTOR_BYTES == 32 && EDGELESS_X86
    const auto wide = (Lanes<float, uint32_t>)_mm256_cvtepu16_epi32((__m128i)bits);
#else
    const auto wide = __builtin_convertvector(bits, Lanes<float, uint32_t>);
#endif
    return (Vec<float>)(wide << 16);
  }
  static EDGELESS_INLINE Vec<float> vector(const Bf16* p) { return of(load_bits(p)); }
  static EDGELESS_INLINE Vec<float> first(const Bf16* p, int64_t n) { return of(load_first_bits(p, n)); }
};

template <>
struct Stored<float, F16> {
  static EDGELESS_INLINE Vec<float> of(Bits16 bits) {
#if EDGELESS_VECTOR_BYTES == 64 && EDGELESS_X86
    return (Vec<float>)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)bits);
#elif EDGELESS_VECTOR_BYTES == 32 && EDGELESS_X86
    return (Vec<float>)_mm256_cvtph_ps((__m128i)bits);
#else
    Vec<float> x;
    for (int64_t i = 0; i < kWidth<float>; ++i) x[i] = float_from_half(bits[i]);
    return x;
#endif
  }
  static EDGELESS_INLINE Vec<float> vector(const F16* p) { return of(load_bits(p)); }
  static EDGELESS_INLINE Vec<float> first(const F16* p, int64_t n) { return of(load_first_bits(p, n)); }
};

// Calls f with a null pointer to the storage type of `dtype`, for rows that are computed in A.
template <class A, class F>
static inline void with_storage(Dtype dtype, F&& f) {
  if constexpr (sizeof(A) == 4) {
    if (dtype == Dtype::bf16) return f(static_cast<const Bf16*>(nullptr));
    if (dtype == Dtype::f16) return f(static_cast<const F16*>(nullptr));
  }
  f(static_cast<const A*>(nullptr));
}

// Converts the elements [first, first + n) of `source` (16-bit or of type A) to A.
template <class A>
static inline void widen(A* out, const void* source, Dtype dtype, int64_t first, int64_t n) {
  if (dtype == Dtype::bf16) {
    const uint16_t* in = static_cast<const uint16_t*>(source) + first;
    for (int64_t i = 0; i < n; ++i) out[i] = float_from_bf16(in[i]);
  } else if (dtype == Dtype::f16) {
    const uint16_t* in = static_cast<const uint16_t*>(source) + first;
    int64_t i = 0;
#if defined(__F16C__)
    if (sizeof(A) == 4) {
      for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
        _mm256_storeu_ps(reinterpret_cast<float*>(out) + i, x);
      }
    }
#endif
    for (; i < n; ++i) out[i] = float_from_half(in[i]);
  } else {
    __builtin_memcpy(out, static_cast<const A*>(source) + first, n * sizeof(A));
  }
}

template <class A>
static inline void narrow(void* target, Dtype dtype, int64_t first, const A* in, int64_t n) {
  if (dtype == Dtype::bf16) {
    uint16_t* out = static_cast<uint16_t*>(target) + first;
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_from_float(static_cast<float>(in[i]));
  } else if (dtype == Dtype::f16) {
    uint16_t* out = static_cast<uint16_t*>(target) + first;
    for (int64_t i = 0; i < n; ++i) out[i] = half_from_float(static_cast<float>(in[i]));
  } else {
    __builtin_memcpy(static_cast<A*>(target) + first, in, n * sizeof(A));
  }
}

// Copies by non-temporal stores, which neither read the target's cache lines nor leave them in the caches.
static inline void copy_around_caches(void* target, const void* source, int64_t bytes) {
#if EDGELESS_VECTOR_BYTES == 64 && EDGELESS_X86
  if (reinterpret_cast<uintptr_t>(target) % 64 == 0 && bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
      _mm512_stream_ps(reinterpret_cast<float*>(static_cast<char*>(target) + i),
                       _mm512_loadu_ps(reinterpret_cast<const float*>(static_cast<const char*>(source) + i)));
    }
    return;
  }
#elif EDGELESS_VECTOR_BYTES == 32 && EDGELESS_X86
  if (reinterpret_cast<uintptr_t>(target) % 32 == 0 && bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 32) {
      _mm256_stream_ps(reinterpret_cast<float*>(static_cast<char*>(target) + i),
                       _mm256_loadu_ps(reinterpret_cast<const float*>(static_cast<const char*>(source) + i)));
    }
    return;
  }
#endif
  __builtin_memcpy(target, source, bytes);
}

// Orders the non-temporal stores before later stores, so that other threads see them.
static inline void fence_streams() {
#if EDGELESS_X86
  _mm_sfence();
#endif
}

template <class A>
static constexpr bool is_native(Dtype dtype) {
  return dtype == (sizeof(A) == 4 ? Dtype::f32 : Dtype::f64);
}

// The row of a node as padded A: in place if it is stored so, else a copy in `buffer` [H, padded].
template <class A>
static inline const A* row_of(const Rows& rows, int64_t node, int64_t heads, int64_t dim, int64_t padded, A* buffer) {
  const int64_t first = node * rows.stride;
  if (is_native<A>(rows.dtype) && dim == padded) return static_cast<const A*>(rows.data) + first;
  if (dim == padded) {
    widen(buffer, rows.data, rows.dtype, first, heads * dim);
    return buffer;
  }
  for (int64_t h = 0; h < heads; ++h) {
    widen(buffer + h * padded, rows.data, rows.dtype, first + h * dim, dim);
    for (int64_t d = dim; d < padded; ++d) buffer[h * padded + d] = A(0);
  }
  return buffer;
}

// The inverse of row_of() for an output [N, H, dim] with contiguous rows.
template <class A>
static inline void write_row(const OutRows& rows, int64_t node, int64_t heads, int64_t dim, int64_t padded,
                             const A* row) {
  const int64_t first = node * rows.stride;
  if (dim == padded) {
    if (rows.bypass && is_native<A>(rows.dtype)) {
      copy_around_caches(static_cast<A*>(rows.data) + first, row, heads * dim * sizeof(A));
      return;
    }
    narrow(rows.data, rows.dtype, first, row, heads * dim);
    return;
  }
  for (int64_t h = 0; h < heads; ++h) narrow(rows.data, rows.dtype, first + h * dim, row + h * padded, dim);
}
