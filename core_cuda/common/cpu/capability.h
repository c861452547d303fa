// Detects the instruction sets of this machine and holds the widest one that kernels may use.
#pragma once

#include <cstdlib>
#include <string_view>

#include "isa.h"

namespace edgeless::cpu {

enum class Capability { baseline, avx2, avx512 };

// The widest instruction set of this machine up to `most`: baseline, avx2 or avx512; any other value sets no limit.
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

// The widest instruction set that kernels may use; the environment variable EDGELESS_CPU_CAPABILITY limits it.
inline Capability& chosen_capability() {
  static Capability chosen = [] {
    const char* most = std::getenv("EDGELESS_CPU_CAPABILITY");
    return detect_capability(most ? most : "");
  }();
  return chosen;
}

inline Capability capability() { return chosen_capability(); }

// Limits the instruction set of later calls, for tests and comparisons. No op may be running.
inline void limit_capability(std::string_view most) { chosen_capability() = detect_capability(most); }

}  // namespace edgeless::cpu
