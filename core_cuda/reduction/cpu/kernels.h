// The min/max kernels of each instruction set and the choice among them.
#pragma once

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "args.h"

namespace edgeless::cpu {

namespace baseline {
template <class A>
ReduceKernels<A> reduce_kernels();
}
#if EDGELESS_X86
namespace avx2 {
template <class A>
ReduceKernels<A> reduce_kernels();
}
namespace avx512 {
template <class A>
ReduceKernels<A> reduce_kernels();
}
#endif

template <class A>
ReduceKernels<A> choose_reduce_kernels() {
#if EDGELESS_X86
  if (capability() == Capability::avx512) return avx512::reduce_kernels<A>();
  if (capability() == Capability::avx2) return avx2::reduce_kernels<A>();
#endif
  return baseline::reduce_kernels<A>();
}

}  // namespace edgeless::cpu
