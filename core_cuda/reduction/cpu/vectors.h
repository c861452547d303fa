// Integer vectors for positions, and reductions over lanes. Included once per instruction set.

template <class A>
using IntVec = typename VectorOf<typename ExpTraits<A>::Int>::type;

// Calls f with a null pointer to the type of positions that have `size` bytes.
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

// Offsets of the rows of the next edges, kAhead more than are processed, for prefetches.
struct Upcoming {
  static constexpr int64_t kSize = 256;
  int64_t first = 0, end = 0;  // range of edges
  int64_t offset[kSize + kAhead];

  // Makes the edges [begin, begin + n), and up to kAhead more, available. n is at most kSize.
  template <class Fill>
  void reach(const Compressed& g, int64_t begin, int64_t n, Fill&& fill) {
    const int64_t wanted = begin + n + kAhead < g.num_edges ? begin + n + kAhead : g.num_edges;
    if (begin >= first && wanted <= end) return;
    first = begin;
    end = begin + kSize + kAhead < g.num_edges ? begin + kSize + kAhead : g.num_edges;
    fill(first, end - first);
  }
};
