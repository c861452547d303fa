// Gathers a batch's attributes from packed ones on CUDA. No CUDA and no torch.
#pragma once

#include "../jit/queue.h"
#include "columns.h"

namespace edgeless::cuda {

// Writes all columns in one launch.
void gather_packed(const PackedColumns& columns, const jit::Queue& queue);

}  // namespace edgeless::cuda
