// Launches the kernel of gather.cuh.
#include "gather.h"

#include <algorithm>

#include "../common/threads.h"
#include "../jit/launch.h"

namespace edgeless::cuda {

void gather_packed(const PackedColumns& columns, const jit::Queue& queue) {
  int64_t most = 0;
  for (int i = 0; i < columns.count; ++i) most = std::max(most, units_of(columns.at[i]));
  if (most == 0) return;
  const jit::Expression kernel("packed/gather.cuh", "gather_packed_kernel");
  jit::launch(queue, kernel, {{blocks_for(most), columns.count}, kThreads}, columns);
}

}  // namespace edgeless::cuda
