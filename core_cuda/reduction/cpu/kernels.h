// The kernels of minima and maxima, as common/cpu/dispatch.h chooses them.
#pragma once

#include "../../common/cpu/dispatch.h"
#include "args.h"

namespace edgeless::cpu {

EDGELESS_KERNELS(ReduceKernels, reduce_kernels)

}  // namespace edgeless::cpu
