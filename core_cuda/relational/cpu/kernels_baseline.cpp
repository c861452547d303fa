// The kernels of this folder for the instruction set "baseline".
#include "../../common/cpu/isa.h"
#include "../../common/cpu/partition.h"
#include "kernels.h"

#define EDGELESS_VECTOR_BYTES 16
namespace edgeless::cpu::baseline {
#include "bodies.h"
}  // namespace edgeless::cpu::baseline
