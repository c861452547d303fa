// The kernels of typed products of each instruction set and the choice among them.
#pragma once

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "args.h"

namespace edgeless::cpu {

namespace baseline {
template <class A>
TypedKernels<A> typed_kernels();
}
#if EDGELESS_X86
namespace avx2 {
template <class A>
TypedKernels<A> typed_kernels();
}
namespace avx512 {
template <class A>
TypedKernels<A> typed_kernels();
}
#endif

template <class A>
TypedKernels<A> choose_typed_kernels() {
#if EDGELESS_X86
  if (capability() == Capability::avx512) return avx512::typed_kernels<A>();
  if (capability() == Capability::avx2) return avx2::typed_kernels<A>();
#endif
  return baseline::typed_kernels<A>();
}

}  // namespace edgeless::cpu
