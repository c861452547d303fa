// Vectors of one instruction set. Included once per instruction set, inside its namespace and target pragma;
// EDGELESS_VECTOR_BYTES is the width. No include guard on purpose.

template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(EDGELESS_VECTOR_BYTES)));
};
template <class A>
using Vec = typename VectorOf<A>::type;

template <class A>
constexpr int64_t kWidth = EDGELESS_VECTOR_BYTES / sizeof(A);

template <class A>
static EDGELESS_INLINE Vec<A> load(const A* p) {
  Vec<A> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class A>
static EDGELESS_INLINE void store(A* p, Vec<A> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class A>
static EDGELESS_INLINE Vec<A> splat(A x) {
  return x - Vec<A>{};  // x - 0 keeps the sign of zero and NaN
}

template <class A>
static EDGELESS_INLINE Vec<A> abs_vec(Vec<A> x) {
  return x > Vec<A>{} ? x : -x;  // compiles to one and-not or one max
}

template <class A>
static EDGELESS_INLINE Vec<A> sqrt_vec(Vec<A> x) {
  for (int64_t i = 0; i < kWidth<A>; ++i) x[i] = sizeof(A) == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
  return x;
}

template <class A>
static EDGELESS_INLINE A sum(Vec<A> v) {
  A total = v[0];
  for (int64_t i = 1; i < kWidth<A>; ++i) total += v[i];
  return total;
}

// The largest element; unspecified if one is NaN.
template <class A>
static EDGELESS_INLINE A largest(Vec<A> v) {
  A most = v[0];
  for (int64_t i = 1; i < kWidth<A>; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

// Intrinsics, because for the loop above the compiler keeps a library call that sets errno.
#if EDGELESS_VECTOR_BYTES == 64
template <>
EDGELESS_INLINE Vec<float> sqrt_vec<float>(Vec<float> x) {
  return (Vec<float>)_mm512_sqrt_ps((__m512)x);
}
template <>
EDGELESS_INLINE Vec<double> sqrt_vec<double>(Vec<double> x) {
  return (Vec<double>)_mm512_sqrt_pd((__m512d)x);
}
#elif EDGELESS_VECTOR_BYTES == 32
template <>
EDGELESS_INLINE Vec<float> sqrt_vec<float>(Vec<float> x) {
  return (Vec<float>)_mm256_sqrt_ps((__m256)x);
}
template <>
EDGELESS_INLINE Vec<double> sqrt_vec<double>(Vec<double> x) {
  return (Vec<double>)_mm256_sqrt_pd((__m256d)x);
}
#endif

#if EDGELESS_VECTOR_BYTES == 64
template <>
EDGELESS_INLINE float sum<float>(Vec<float> v) {
  return _mm512_reduce_add_ps((__m512)v);
}
template <>
EDGELESS_INLINE float largest<float>(Vec<float> v) {
  return _mm512_reduce_max_ps((__m512)v);
}
#endif

// x in the first n lanes, `other` in the others
template <class A>
static EDGELESS_INLINE Vec<A> first_lanes(Vec<A> x, int64_t n, A other = A(0)) {
  Vec<A> lane;
  for (int64_t i = 0; i < kWidth<A>; ++i) lane[i] = A(i);
  return lane < splat<A>(A(n)) ? x : splat<A>(other);
}

// Loads the first n elements at p, 0 < n < kWidth, and zeros for the others. Reads nothing else.
template <class A>
static EDGELESS_INLINE Vec<A> load_first(const A* p, int64_t n) {
  Vec<A> v = {};
  __builtin_memcpy(&v, p, n * sizeof(A));
  return v;
}

// Writes the first n elements of v, and nothing else.
template <class A>
static EDGELESS_INLINE void store_first(A* p, Vec<A> v, int64_t n) {
  __builtin_memcpy(p, &v, n * sizeof(A));
}

#if EDGELESS_VECTOR_BYTES == 64
template <>
EDGELESS_INLINE Vec<float> load_first<float>(const float* p, int64_t n) {
  return (Vec<float>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
template <>
EDGELESS_INLINE Vec<double> load_first<double>(const double* p, int64_t n) {
  return (Vec<double>)_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p);
}
template <>
EDGELESS_INLINE void store_first<float>(float* p, Vec<float> v, int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
}
template <>
EDGELESS_INLINE void store_first<double>(double* p, Vec<double> v, int64_t n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << n) - 1), (__m512d)v);
}
#elif EDGELESS_VECTOR_BYTES == 32
// Masks of the first n 4-byte lanes, and of the first n 8-byte lanes.
static EDGELESS_INLINE __m256i first_of_4_bytes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static EDGELESS_INLINE __m256i first_of_8_bytes(int64_t n) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}
template <>
EDGELESS_INLINE Vec<float> load_first<float>(const float* p, int64_t n) {
  return (Vec<float>)_mm256_maskload_ps(p, first_of_4_bytes(n));
}
template <>
EDGELESS_INLINE Vec<double> load_first<double>(const double* p, int64_t n) {
  return (Vec<double>)_mm256_maskload_pd(p, first_of_8_bytes(n));
}
template <>
EDGELESS_INLINE void store_first<float>(float* p, Vec<float> v, int64_t n) {
  _mm256_maskstore_ps(p, first_of_4_bytes(n), (__m256)v);
}
template <>
EDGELESS_INLINE void store_first<double>(double* p, Vec<double> v, int64_t n) {
  _mm256_maskstore_pd(p, first_of_8_bytes(n), (__m256d)v);
}
#endif

// load() for elements that were stored four at a time: a load that spans several stores gets no store forwarding and
// waits until the stores reach the cache.
template <class A>
static EDGELESS_INLINE Vec<A> load_fours(const A* p) {
  return load(p);
}

#if EDGELESS_VECTOR_BYTES == 64
template <>
EDGELESS_INLINE Vec<float> load_fours<float>(const float* p) {
  const __m512 a = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4), 1);
  return (Vec<float>)_mm512_insertf32x4(_mm512_insertf32x4(a, _mm_loadu_ps(p + 8), 2), _mm_loadu_ps(p + 12), 3);
}
#elif EDGELESS_VECTOR_BYTES == 32
template <>
EDGELESS_INLINE Vec<float> load_fours<float>(const float* p) {
  return (Vec<float>)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4), 1);
}
#endif

// out[i] = sum of the elements of v[i], i < 4.
template <class A>
static EDGELESS_INLINE void sum4(const Vec<A>* v, A* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum<A>(v[i]);
}

#if EDGELESS_VECTOR_BYTES == 64
template <>
EDGELESS_INLINE void sum4<float>(const Vec<float>* v, float* out) {
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d ab_ = _mm512_castps_pd(ab), cd_ = _mm512_castps_pd(cd);
  const __m512 x =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_, cd_)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab_, cd_)));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
#elif EDGELESS_VECTOR_BYTES == 32
template <>
EDGELESS_INLINE void sum4<float>(const Vec<float>* v, float* out) {
  const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
#endif

// out[i] = the largest element of v[i], i < 4; unspecified if one is NaN.
template <class A>
static EDGELESS_INLINE void largest4(const Vec<A>* v, A* out) {
  for (int i = 0; i < 4; ++i) out[i] = largest<A>(v[i]);
}

#if EDGELESS_VECTOR_BYTES == 64
template <>
EDGELESS_INLINE void largest4<float>(const Vec<float>* v, float* out) {
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d ab_ = _mm512_castps_pd(ab), cd_ = _mm512_castps_pd(cd);
  const __m512 x =
      _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_, cd_)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab_, cd_)));
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
#elif EDGELESS_VECTOR_BYTES == 32
template <>
EDGELESS_INLINE void largest4<float>(const Vec<float>* v, float* out) {
  const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
  const __m256 ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d ab_ = _mm256_castps_pd(ab), cd_ = _mm256_castps_pd(cd);
  const __m256 x =
      _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab_, cd_)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab_, cd_)));
  _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
#endif

static constexpr double kInverseFactorial[14] = {
    1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
    1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};

template <class A>
struct ExpTraits;
template <>
struct ExpTraits<float> {
  typedef int32_t Int;
  static constexpr int bias = 127, mantissa = 23, degree = 7;
  static constexpr float lowest = -87.3f, highest = 88.0f, magic = 12582912.0f;
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, log2e = 1.44269504f;
};
template <>
struct ExpTraits<double> {
  typedef int64_t Int;
  static constexpr int bias = 1023, mantissa = 52, degree = 13;
  static constexpr double lowest = -708.0, highest = 709.0, magic = 6755399441055744.0;
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  static constexpr double log2e = 1.4426950408889634;
};

// e^x as 2^n e^r with |r| <= ln(2) / 2 and the Taylor series of e^r. 0 if the result would be subnormal; NaN stays NaN.
// Relative error below 2e-7 in float and 3e-16 in double.
template <class A>
static EDGELESS_INLINE Vec<A> exp_vec(Vec<A> x) {
  typedef ExpTraits<A> T;
  typedef typename T::Int I;
  const Vec<A> low = splat<A>(T::lowest), high = splat<A>(T::highest);
  Vec<A> t = x < low ? low : x;
  t = t > high ? high : t;
  const Vec<A> shifted = t * T::log2e + T::magic;
  const Vec<A> n = shifted - T::magic;
  const Vec<A> r = (t - n * T::ln2_high) - n * T::ln2_low;
  Vec<A> p = splat<A>(A(kInverseFactorial[T::degree]));
#pragma GCC unroll 16
  for (int k = T::degree - 1; k >= 0; --k) p = p * r + A(kInverseFactorial[k]);
  typedef I IVec __attribute__((vector_size(EDGELESS_VECTOR_BYTES)));
  const IVec bits = ((IVec)shifted << T::mantissa) + (I(T::bias) << T::mantissa);
  const Vec<A> result = p * (Vec<A>)bits;
  return x < low ? Vec<A>{} : result;
}
