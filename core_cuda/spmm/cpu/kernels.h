// The SpMM kernels of each instruction set and the choice among them.
#pragma once

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "args.h"

namespace edgeless::cpu {

namespace baseline {
template <class A>
SpmmKernels<A> spmm_kernels();
}
#if EDGELESS_X86
namespace avx2 {
template <class A>
SpmmKernels<A> spmm_kernels();
}
namespace avx512 {
template <class A>
SpmmKernels<A> spmm_kernels();
}
#endif

template <class A>
SpmmKernels<A> choose_spmm_kernels() {
#if EDGELESS_X86
  if (capability() == Capability::avx512) return avx512::spmm_kernels<A>();
  if (capability() == Capability::avx2) return avx2::spmm_kernels<A>();
#endif
  return baseline::spmm_kernels<A>();
}

}  // namespace edgeless::cpu
