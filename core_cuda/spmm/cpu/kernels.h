// The kernels of SpMM and SDDMM; common/cpu/dispatch.h selects the instruction set.
#pragma once

#include "../../common/cpu/dispatch.h"
#include "args.h"

namespace edgeless::cpu {

EDGELESS_KERNELS(SpmmKernels, spmm_kernels)

}  // namespace edgeless::cpu
