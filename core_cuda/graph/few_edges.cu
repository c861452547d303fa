// Launches the kernels of few_edges.cuh.
#include "few_edges.cuh"

namespace edgeless::cuda {
namespace {

// The sort writes its permutation to `order`; all other buffers are in scratch.
GridSortArgs sort_args(int64_t items, int32_t* order, int32_t* scratch) {
  return {{scratch, scratch + items}, {order, scratch + 2 * items}, scratch + 3 * items};
}

}  // namespace

int64_t grid_sort_scratch(int64_t items, int multiprocessors) {
  return 3 * items + int64_t{kDigits} * grid_blocks(items, multiprocessors);
}

template <class In>
cudaError_t sort_few_edges(const FewCooArgs<In>& args, int32_t* scratch, int multiprocessors, cudaStream_t stream) {
  const CooLaunch<In> launch{args, sort_args(args.edges, args.edge_ids, scratch)};
  return launch_grid(few_coo_kernel<In>, launch, grid_blocks(args.edges, multiprocessors), stream);
}

cudaError_t transpose_few_edges(const FewTransposeArgs& args, int32_t* scratch, int multiprocessors,
                                cudaStream_t stream) {
  const TransposeLaunch launch{args, sort_args(args.edges, args.to_edge_ids, scratch)};
  return launch_grid(few_transpose_kernel, launch, grid_blocks(args.edges, multiprocessors), stream);
}

template cudaError_t sort_few_edges<int32_t>(const FewCooArgs<int32_t>&, int32_t*, int, cudaStream_t);
template cudaError_t sort_few_edges<int64_t>(const FewCooArgs<int64_t>&, int32_t*, int, cudaStream_t);

}  // namespace edgeless::cuda
