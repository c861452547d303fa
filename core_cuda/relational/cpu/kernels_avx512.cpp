// The kernels of this folder for the instruction set "avx512".
#include "../../common/cpu/isa.h"
#include "../../common/cpu/partition.h"
#include "kernels.h"

#if EDGELESS_X86
EDGELESS_PUSH_TARGET(EDGELESS_AVX512_FEATURES)
#define EDGELESS_VECTOR_BYTES 64
namespace edgeless::cpu::avx512 {
#include "bodies.h"
}  // namespace edgeless::cpu::avx512
EDGELESS_POP_TARGET
#endif
