// Launches the kernel of pad_rows.cuh.
#include "pad_rows.h"

#include <algorithm>

#include "../jit/launch.h"
#include "threads.h"

namespace edgeless::cuda {

void pad_rows(const RowsCopies& copies, const jit::Queue& queue) {
  int64_t most = 0;
  for (int i = 0; i < copies.count; ++i) most = std::max(most, vectors_of(copies.at[i]));
  if (most == 0) return;
  const jit::Expression kernel("common/pad_rows.cuh", "pad_rows_kernel");
  jit::launch(queue, kernel, {{blocks_for(most), copies.count}, kThreads}, copies);
}

}  // namespace edgeless::cuda
