// Declares the kernel tables of the instruction sets.
#pragma once

#include "../../common/cpu/isa.h"
#include "args.h"

namespace edgeless::cpu {

#define EDGELESS_DECLARE_KERNELS(isa)               \
  namespace isa {                                   \
  template <class A>                                \
  Kernels<A> kernels(Score score, int64_t vectors); \
  }
EDGELESS_DECLARE_KERNELS(baseline)
#if EDGELESS_X86
EDGELESS_DECLARE_KERNELS(avx2)
EDGELESS_DECLARE_KERNELS(avx512)
#endif
#undef EDGELESS_DECLARE_KERNELS

}  // namespace edgeless::cpu
