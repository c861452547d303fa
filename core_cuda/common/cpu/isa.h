// How one source becomes the kernels of several instruction sets. A translation unit includes every header from
// elsewhere first, then
//     EDGELESS_PUSH_TARGET(EDGELESS_AVX512_FEATURES)
//     #define EDGELESS_VECTOR_BYTES 64
//     ...code of the kernels, in a namespace of its own...
//     EDGELESS_POP_TARGET
// and all functions in between are compiled for that instruction set. No compiler flag is needed, so one build serves
// every machine; and no inline function of a foreign header is compiled for the newer set and then chosen by the linker
// for all.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define EDGELESS_X86 1
#include <immintrin.h>
#else
#define EDGELESS_X86 0
#endif

#define EDGELESS_AVX2_FEATURES "avx2,fma,f16c"
#define EDGELESS_AVX512_FEATURES "avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512dq"

// For the small functions of an inner loop: a call would have every vector register saved around it.
#if defined(__GNUC__)
#define EDGELESS_INLINE inline __attribute__((always_inline))
#else
#define EDGELESS_INLINE inline
#endif

#define EDGELESS_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define EDGELESS_PUSH_TARGET(features) \
  EDGELESS_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define EDGELESS_POP_TARGET _Pragma("clang attribute pop")
#else
#define EDGELESS_PUSH_TARGET(features) EDGELESS_PRAGMA(GCC push_options) EDGELESS_PRAGMA(GCC target(features))
#define EDGELESS_POP_TARGET _Pragma("GCC pop_options")
#endif
