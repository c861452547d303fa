// Which instruction sets this machine has.
#pragma once

#include <cstdlib>
#include <cstring>

#include "isa.h"

namespace edgeless::cpu {

enum class Capability { baseline, avx2, avx512 };

inline Capability detect_capability() {
#if EDGELESS_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  const char* most = std::getenv("EDGELESS_CPU_CAPABILITY");  // for tests and comparisons: baseline, avx2, avx512
  if (most && std::strcmp(most, "baseline") == 0) return Capability::baseline;
  if (avx512 && !(most && std::strcmp(most, "avx2") == 0)) return Capability::avx512;
  if (avx2) return Capability::avx2;
#endif
  return Capability::baseline;
}

inline Capability capability() {
  static const Capability found = detect_capability();
  return found;
}

}  // namespace edgeless::cpu
