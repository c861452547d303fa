// Rows as they are stored, one vector at a time, and questions to all lanes. Included once per instruction set.

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class A>
using IntVec = typename VectorOf<typename ExpTraits<A>::Int>::type;

// As many elements of the type T as a vector of A has.
template <class A, class T>
struct LanesOf {
  typedef T type __attribute__((vector_size(kWidth<A> * sizeof(T))));
};
template <class A, class T>
using Lanes = typename LanesOf<A, T>::type;

// kWidth<A> elements in storage type S as a vector of A.
template <class A, class S>
struct Stored;

template <class A>
struct Stored<A, A> {
  static Vec<A> vector(const A* p) { return load(p); }
};

template <>
struct Stored<float, Bf16> {
  static Vec<float> vector(const Bf16* p) {
    Lanes<float, uint16_t> bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return (Vec<float>)(__builtin_convertvector(bits, Lanes<float, uint32_t>) << 16);
  }
};

template <>
struct Stored<float, F16> {
  static Vec<float> vector(const F16* p) {
#if EDGELESS_VECTOR_BYTES == 64 && EDGELESS_X86
    return (Vec<float>)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif EDGELESS_VECTOR_BYTES == 32 && EDGELESS_X86
    return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Vec<float> x;
    for (int64_t i = 0; i < kWidth<float>; ++i) x[i] = float_from_half(p[i].bits);
    return x;
#endif
  }
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

// Calls f with a null pointer to the type of positions of `size` bytes.
template <class F>
static inline void with_positions(int64_t size, F&& f) {
  if (size == 1) return f(static_cast<const uint8_t*>(nullptr));
  if (size == 2) return f(static_cast<const uint16_t*>(nullptr));
  f(static_cast<const int32_t*>(nullptr));
}

template <class V>
static inline bool any_bit(V v) {
#if EDGELESS_VECTOR_BYTES == 64 && EDGELESS_X86
  return _mm512_test_epi64_mask((__m512i)v, (__m512i)v) != 0;
#elif EDGELESS_VECTOR_BYTES == 32 && EDGELESS_X86
  return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
  uint64_t words[sizeof(V) / 8], any = 0;
  __builtin_memcpy(words, &v, sizeof v);
  for (uint64_t word : words) any |= word;
  return any != 0;
#endif
}

// Where the rows of the next edges stand, some ahead so that they can be asked for early.
struct Upcoming {
  static constexpr int64_t kSize = 256;
  int64_t first = 0, end = 0;  // positions of edges
  int64_t offset[kSize + kAhead];

  // Afterwards [begin, begin + n) is known, and up to kAhead more. n is at most kSize.
  template <class Fill>
  void reach(const Compressed& g, int64_t begin, int64_t n, Fill&& fill) {
    const int64_t wanted = begin + n + kAhead < g.num_edges ? begin + n + kAhead : g.num_edges;
    if (begin >= first && wanted <= end) return;
    first = begin;
    end = begin + kSize + kAhead < g.num_edges ? begin + kSize + kAhead : g.num_edges;
    fill(first, end - first);
  }
};
