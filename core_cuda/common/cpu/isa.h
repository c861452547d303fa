// Compiles one source for several instruction sets. A translation unit includes all other headers first, then
//     EDGELESS_PUSH_TARGET(EDGELESS_AVX512_FEATURES)
//     #define EDGELESS_VECTOR_BYTES 64
//     ...code of the kernels, in a namespace of its own...
//     EDGELESS_POP_TARGET
// and all functions in between are compiled for that instruction set. No compiler flag is needed, so one build serves
// every machine. Inline functions of other headers are not compiled for the newer instruction set: the linker could
// pick such a copy for all callers.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define EDGELESS_X86 1
#include <immintrin.h>
#else
#define EDGELESS_X86 0
#endif

#define EDGELESS_AVX2_FEATURES "avx2,fma,f16c"
#define EDGELESS_AVX512_FEATURES "avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512dq"

// Marks small functions in inner loops, where a call would save and restore every vector register.
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
