// The kernels of min and max; common/cpu/dispatch.h selects the instruction set.
#pragma once

#include "../../common/cpu/dispatch.h"
#include "args.h"

namespace edgeless::cpu {

EDGELESS_KERNELS(ReduceKernels, reduce_kernels)

}  // namespace edgeless::cpu
