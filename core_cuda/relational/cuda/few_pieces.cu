// The host function that launches the kernel of few_pieces.cuh.
#include "few_pieces.cuh"

namespace edgeless::cuda::relational {

int64_t few_pieces_scratch(int64_t edges, int multiprocessors) {
  return 5 * edges + int64_t{kDigits} * grid_blocks(edges, multiprocessors);
}

template <class T>
cudaError_t cut_few_edges(const FewTypedArgs<T>& args, int32_t* scratch, int multiprocessors, cudaStream_t stream) {
  const int64_t n = args.edges;
  const GridSortArgs sort{{scratch, scratch + n}, {scratch + 2 * n, scratch + 3 * n}, scratch + 5 * n};
  return launch_grid(few_pieces_kernel<T>, Launch<T>{args, sort, scratch + 4 * n}, grid_blocks(n, multiprocessors),
                     stream);
}

template cudaError_t cut_few_edges<int32_t>(const FewTypedArgs<int32_t>&, int32_t*, int, cudaStream_t);
template cudaError_t cut_few_edges<int64_t>(const FewTypedArgs<int64_t>&, int32_t*, int, cudaStream_t);

}  // namespace edgeless::cuda::relational
