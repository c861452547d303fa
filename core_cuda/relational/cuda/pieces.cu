// Pieces of sorted edges: launches of the kernels (pieces.cuh), and the two scans between them.
#include "pieces.cuh"

#include <cub/device/device_scan.cuh>

namespace edgeless::cuda::relational {
namespace {

struct Larger {
  template <class I>
  __host__ __device__ I operator()(I a, I b) const {
    return a < b ? b : a;
  }
};

template <class I>
size_t scan_bytes(int64_t edges) {
  size_t maximum = 0, sum = 0;
  I* none = nullptr;
  cub::DeviceScan::InclusiveScan(nullptr, maximum, none, none, Larger{}, edges);
  cub::DeviceScan::InclusiveSum(nullptr, sum, none, none, edges);
  return maximum < sum ? sum : maximum;
}

}  // namespace

template <class I>
cudaError_t arrange_edges(const ArrangeArgs<I>& args, cudaStream_t stream) {
  if (args.edges == 0) return cudaSuccess;
  arrange_kernel<I><<<blocks_for(args.edges), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class I>
size_t pieces_scratch(int64_t edges) {
  return edges ? scan_bytes<I>(edges) : 0;
}

template <class I>
cudaError_t cut_into_pieces(const PiecesArgs<I>& args, void* scratch, cudaStream_t stream) {
  const unsigned blocks = blocks_for(args.edges + 1);
  if (args.edges) {
    size_t bytes = scan_bytes<I>(args.edges);
    run_begins_kernel<I><<<blocks, kThreads, 0, stream>>>(args);
    cudaError_t error =
        cub::DeviceScan::InclusiveScan(scratch, bytes, args.numbers, args.numbers, Larger{}, args.edges, stream);
    if (error != cudaSuccess) return error;
    piece_begins_kernel<I><<<blocks, kThreads, 0, stream>>>(args);
    error = cub::DeviceScan::InclusiveSum(scratch, bytes, args.numbers, args.numbers, args.edges, stream);
    if (error != cudaSuccess) return error;
  }
  pieces_kernel<I><<<blocks, kThreads, 0, stream>>>(args);
  type_pieces_kernel<I><<<blocks_for(args.num_types + 1), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class I, class A>
cudaError_t run_means(const MeansArgs<I, A>& args, cudaStream_t stream) {
  if (args.most_pieces == 0) return cudaSuccess;
  if (args.edge_ids) {
    means_kernel<I, A><<<blocks_for(args.most_pieces * kWarp), kThreads, 0, stream>>>(args);
  } else {
    means_of_pieces_kernel<I, A><<<blocks_for(args.most_pieces), kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class I>
cudaError_t run_pairs(const I* ptr, int64_t pairs, const I* edge_ids, int64_t edges, I* of_edges, cudaStream_t stream) {
  if (edges == 0) return cudaSuccess;
  pairs_kernel<I><<<blocks_for(edges), kThreads, 0, stream>>>(ptr, pairs, edge_ids, edges, of_edges);
  return cudaGetLastError();
}

#define INSTANTIATE(I)                                                                       \
  template cudaError_t arrange_edges<I>(const ArrangeArgs<I>&, cudaStream_t);                \
  template size_t pieces_scratch<I>(int64_t);                                                \
  template cudaError_t run_pairs<I>(const I*, int64_t, const I*, int64_t, I*, cudaStream_t); \
  template cudaError_t cut_into_pieces<I>(const PiecesArgs<I>&, void*, cudaStream_t);        \
  template cudaError_t run_means<I, float>(const MeansArgs<I, float>&, cudaStream_t);        \
  template cudaError_t run_means<I, double>(const MeansArgs<I, double>&, cudaStream_t);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace edgeless::cuda::relational
