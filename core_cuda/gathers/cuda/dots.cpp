// Launches the kernel of dots.cuh.
#include "dots.h"

#include "../../common/kernel_types.h"
#include "../../common/threads.h"
#include "../../jit/launch.h"

namespace edgeless::cuda::gathers {

void run_dots(bool wide_index, bool by_neighbor, bool vectors, const DotsArgs& args, const jit::Queue& queue) {
  if (args.graph.num_rows == 0) return;
  const jit::Type load{vectors ? "float4" : "float"};
  const jit::Expression kernel("gathers/cuda/dots.cuh", "gathers::dots_kernel",
                               {index_type(wide_index), load, by_neighbor});
  jit::launch(queue, kernel, {blocks_for(args.graph.num_rows * 32), kThreads}, args);  // one warp per row
}

}  // namespace edgeless::cuda::gathers
