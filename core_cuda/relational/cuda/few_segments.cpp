// Launches the kernel of few_segments.cuh.
#include "few_segments.h"

#include "../../common/kernel_types.h"
#include "../../graph/grid_launch.h"

namespace edgeless::cuda::relational {

int64_t few_segments_scratch(int64_t edges, int multiprocessors) {
  return 5 * edges + int64_t{kDigits} * grid_blocks(edges, multiprocessors);
}

template <class T>
void cut_few_edges(const FewTypedArgs<T>& args, int32_t* scratch, int multiprocessors, const jit::Queue& queue) {
  const int64_t n = args.edges;
  const GridSortArgs sort{{scratch, scratch + n}, {scratch + 2 * n, scratch + 3 * n}, scratch + 5 * n};
  const jit::Expression kernel("relational/cuda/few_segments.cuh", "relational::few_segments_kernel", {type_of<T>()});
  launch_grid(kernel, FewSegments<T>{args, sort, scratch + 4 * n}, grid_blocks(n, multiprocessors), queue);
}

template void cut_few_edges<int32_t>(const FewTypedArgs<int32_t>&, int32_t*, int, const jit::Queue&);
template void cut_few_edges<int64_t>(const FewTypedArgs<int64_t>&, int32_t*, int, const jit::Queue&);

}  // namespace edgeless::cuda::relational
