// Launches the kernels of few_edges.cuh.
#include "few_edges.h"

#include "../common/kernel_types.h"
#include "grid_launch.h"

namespace edgeless::cuda {
namespace {

constexpr const char* kFewEdgesHeader = "graph/few_edges.cuh";

// The sort writes its permutation to `order`; all other buffers are in scratch.
GridSortArgs sort_args(int64_t items, int32_t* order, int32_t* scratch) {
  return {{scratch, scratch + items}, {order, scratch + 2 * items}, scratch + 3 * items};
}

}  // namespace

int64_t grid_sort_scratch(int64_t items, int multiprocessors) {
  return 3 * items + int64_t{kDigits} * grid_blocks(items, multiprocessors);
}

template <class In>
void sort_few_edges(const FewCooArgs<In>& args, int32_t* scratch, int multiprocessors, const jit::Queue& queue) {
  const CooLaunch<In> launch{args, sort_args(args.edges, args.edge_ids, scratch)};
  const jit::Expression kernel(kFewEdgesHeader, "few_coo_kernel", {type_of<In>()});
  launch_grid(kernel, launch, grid_blocks(args.edges, multiprocessors), queue);
}

void transpose_few_edges(const FewTransposeArgs& args, int32_t* scratch, int multiprocessors, const jit::Queue& queue) {
  const TransposeLaunch launch{args, sort_args(args.edges, args.to_edge_ids, scratch)};
  launch_grid({kFewEdgesHeader, "few_transpose_kernel"}, launch, grid_blocks(args.edges, multiprocessors), queue);
}

template void sort_few_edges<int32_t>(const FewCooArgs<int32_t>&, int32_t*, int, const jit::Queue&);
template void sort_few_edges<int64_t>(const FewCooArgs<int64_t>&, int32_t*, int, const jit::Queue&);

}  // namespace edgeless::cuda
