// The kernels of this folder for the instruction set "avx2".
#include "../../common/cpu/isa.h"
#include "../../common/cpu/partition.h"
#include "kernels.h"

#if EDGELESS_X86
EDGELESS_PUSH_TARGET(EDGELESS_AVX2_FEATURES)
#define EDGELESS_VECTOR_BYTES 32
namespace edgeless::cpu::avx2 {
#include "bodies.h"
}  // namespace edgeless::cpu::avx2
EDGELESS_POP_TARGET
#endif
