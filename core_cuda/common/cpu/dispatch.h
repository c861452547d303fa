// Declares the kernel tables of each instruction set and chooses among them.
//
// EDGELESS_KERNELS(Table, name) declares, in the namespace of every instruction set, `Table<A> name<A>()` for the
// opmath type A, and defines choose_name<A>(), which returns the table of the widest instruction set that this process
// may use.
#pragma once

#include "capability.h"
#include "isa.h"

#define EDGELESS_DECLARE_KERNELS_IN(isa, Table, name) \
  namespace isa {                                     \
  template <class A>                                  \
  Table<A> name();                                    \
  }

#if EDGELESS_X86
#define EDGELESS_KERNELS(Table, name)                                                \
  EDGELESS_DECLARE_KERNELS_IN(baseline, Table, name)                                 \
  EDGELESS_DECLARE_KERNELS_IN(avx2, Table, name)                                     \
  EDGELESS_DECLARE_KERNELS_IN(avx512, Table, name)                                   \
  template <class A>                                                                 \
  Table<A> choose_##name() {                                                         \
    if (capability() == Capability::avx512) return avx512::name<A>();                \
    return capability() == Capability::avx2 ? avx2::name<A>() : baseline::name<A>(); \
  }
#else
#define EDGELESS_KERNELS(Table, name)                \
  EDGELESS_DECLARE_KERNELS_IN(baseline, Table, name) \
  template <class A>                                 \
  Table<A> choose_##name() {                         \
    return baseline::name<A>();                      \
  }
#endif
