// Dropout draws of several edges at once, equal to those of core_cuda/common/dropout.h. Included once per instruction
// set.

static constexpr int64_t kDraws = 8;  // edges per call of draw()
static_assert(kChunk % kDraws == 0, "a chunk is filled up to whole draws");

// The draws of philox() for four heads of each edge.
struct Draws {
  alignas(32) uint32_t of[4][kDraws];
};

#if EDGELESS_X86 && EDGELESS_VECTOR_BYTES >= 32
// The low and high halves of the 64-bit products of eight 32-bit values with `factor`.
static EDGELESS_INLINE void multiply_wide(__m256i x, uint32_t factor, __m256i& low, __m256i& high) {
  const __m256i factors = _mm256_set1_epi64x(factor);
  const __m256i even = _mm256_mul_epu32(x, factors), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factors);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

static EDGELESS_INLINE void store_draws(uint32_t (&to)[kDraws], __m256i drawn) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), drawn);
}

// A mask per edge: all bits set where drawn[e] >= least, else none.
static EDGELESS_INLINE __m256i kept_of(const uint32_t (&drawn)[kDraws], uint32_t least) {
  const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(drawn));
  return _mm256_cmpeq_epi32(_mm256_max_epu32(x, _mm256_set1_epi32(static_cast<int>(least))), x);
}
// to[e] = drawn[e] >= least ? scale : 0, without a branch, which would be unpredictable.
static EDGELESS_INLINE void keep(const uint32_t (&drawn)[kDraws], uint32_t least, float scale, float* to) {
  _mm256_storeu_ps(to, _mm256_and_ps(_mm256_castsi256_ps(kept_of(drawn, least)), _mm256_set1_ps(scale)));
}
static EDGELESS_INLINE void keep(const uint32_t (&drawn)[kDraws], uint32_t least, double scale, double* to) {
  const __m256i kept = kept_of(drawn, least);
  const __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(kept));
  const __m256i high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(kept, 1));
  _mm256_storeu_pd(to, _mm256_and_pd(_mm256_castsi256_pd(low), _mm256_set1_pd(scale)));
  _mm256_storeu_pd(to + 4, _mm256_and_pd(_mm256_castsi256_pd(high), _mm256_set1_pd(scale)));
}

static inline Draws draw(uint64_t seed, const int64_t* edges, uint32_t head_group) {
  alignas(32) uint32_t low[kDraws], high[kDraws];
  for (int64_t e = 0; e < kDraws; ++e) {
    low[e] = static_cast<uint32_t>(edges[e]), high[e] = static_cast<uint32_t>(static_cast<uint64_t>(edges[e]) >> 32);
  }
  __m256i c0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(low));
  __m256i c1 = _mm256_load_si256(reinterpret_cast<const __m256i*>(high));
  __m256i c2 = _mm256_set1_epi32(static_cast<int>(head_group)), c3 = _mm256_setzero_si256();
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxKey0, k1 += kPhiloxKey1) {
    __m256i low0, high0, low1, high1;
    multiply_wide(c0, kPhiloxFactor0, low0, high0);
    multiply_wide(c2, kPhiloxFactor1, low1, high1);
    c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32(static_cast<int>(k0)));
    c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(static_cast<int>(k1)));
    c1 = low1, c3 = low0;
  }
  Draws drawn;
  store_draws(drawn.of[0], c0), store_draws(drawn.of[1], c1), store_draws(drawn.of[2], c2);
  store_draws(drawn.of[3], c3);
  return drawn;
}
#else
template <class A>
static inline void keep(const uint32_t (&drawn)[kDraws], uint32_t least, A scale, A* to) {
  for (int64_t e = 0; e < kDraws; ++e) to[e] = drawn[e] >= least ? scale : A(0);
}

static inline Draws draw(uint64_t seed, const int64_t* edges, uint32_t head_group) {
  Draws drawn;
  for (int64_t e = 0; e < kDraws; ++e) {
    const Philox4 one = philox(seed, static_cast<uint64_t>(edges[e]), head_group);
    for (int64_t i = 0; i < 4; ++i) drawn.of[i][e] = one.lane[i];
  }
  return drawn;
}
#endif
