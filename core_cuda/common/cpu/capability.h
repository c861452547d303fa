// Which instruction sets this machine has, and which of them kernels are chosen of.
#pragma once

#include <cstdlib>
#include <string_view>

#include "isa.h"

namespace edgeless::cpu {

enum class Capability { baseline, avx2, avx512 };

// `most`: baseline, avx2 or avx512; anything else is no limit.
inline Capability detect_capability([[maybe_unused]] std::string_view most) {
#if EDGELESS_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (avx512 && most != "avx2" && most != "baseline") return Capability::avx512;
  if (avx2 && most != "baseline") return Capability::avx2;
#endif
  return Capability::baseline;
}

// What kernels are chosen of: all that there is, but for a limit by the environment variable EDGELESS_CPU_CAPABILITY.
inline Capability& chosen_capability() {
  static Capability chosen = [] {
    const char* most = std::getenv("EDGELESS_CPU_CAPABILITY");
    return detect_capability(most ? most : "");
  }();
  return chosen;
}

inline Capability capability() { return chosen_capability(); }

// Of calls from now on, while none runs: for tests and comparisons.
inline void limit_capability(std::string_view most) { chosen_capability() = detect_capability(most); }

}  // namespace edgeless::cpu
