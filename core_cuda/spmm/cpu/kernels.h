// The kernels of SpMM and SDDMM, as common/cpu/dispatch.h chooses them.
#pragma once

#include "../../common/cpu/dispatch.h"
#include "args.h"

namespace edgeless::cpu {

EDGELESS_KERNELS(SpmmKernels, spmm_kernels)

}  // namespace edgeless::cpu
