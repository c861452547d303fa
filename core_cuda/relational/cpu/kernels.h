// The kernels of typed products, as common/cpu/dispatch.h chooses them.
#pragma once

#include "../../common/cpu/dispatch.h"
#include "args.h"

namespace edgeless::cpu {

EDGELESS_KERNELS(TypedKernels, typed_kernels)

}  // namespace edgeless::cpu
