// Arguments of the CUDA kernels of sums and blends of rows by type. No CUDA and no torch.
#pragma once

#include "kernels.h"

namespace edgeless::cuda::relational {

// Contiguous rows [*, width]; entry i has row rows[i].
struct TypedRowsArgs {
  Entries entries;
  const void* rows = nullptr;  // null: entry i has row i
  int width = 0;
  const void* grad = nullptr;  // gradient of the blend or, without alpha, the rows that are summed
  const void *y = nullptr, *x = nullptr;
  const void* alpha = nullptr;              // [types]; null: sums of rows
  void *out_y = nullptr, *out_x = nullptr;  // backward: gradients of y and x, null where not needed
  int chunk = 0;                            // entries of a chunk, which are of one type
  void* partial = nullptr;                  // [num_tiles, width] in the opmath dtype; null: no sums
  void* sums = nullptr;                     // [types, width], or [types] where `total`: over all columns
  bool total = false;
};

// out_y = alpha y + (1 - alpha) x
void run_typed_blend(Storage storage, const TypedRowsArgs& args, const jit::Queue& queue);
// The sums of grad by type. With an alpha, out_y = alpha grad, out_x = (1 - alpha) grad and the sums of grad (y - x).
void run_typed_sums(Storage storage, const TypedRowsArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
