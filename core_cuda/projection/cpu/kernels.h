// The projection kernels of each instruction set, and the selection of one.
#pragma once

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/views.h"
#include "args.h"

namespace edgeless::cpu {

#if EDGELESS_X86
namespace avx2 {
ProjectionKernels projection_kernels();
}
namespace avx512 {
ProjectionKernels projection_kernels();
}
#endif

// Returns false below AVX2, where torch.mm is no slower than these kernels.
inline bool choose_projection_kernels(ProjectionKernels* kernels) {
#if EDGELESS_X86
  if (capability() == Capability::avx512) return *kernels = avx512::projection_kernels(), true;
  if (capability() == Capability::avx2) return *kernels = avx2::projection_kernels(), true;
#endif
  return false;
}

}  // namespace edgeless::cpu
