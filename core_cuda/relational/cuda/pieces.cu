// Pieces: two scans over the sorted edges. Of a run of edges of one type and one row, the first edge and every cut-th
// after it begin a piece; the sum of these beginnings is the number of the piece that an edge belongs to.
#include <cub/device/device_scan.cuh>

#include "../../common/search.h"
#include "../../common/threads.cuh"
#include "pieces.h"

namespace edgeless::cuda::relational {
namespace {

constexpr int kWarp = 32;

template <class I>
__global__ void arrange_kernel(ArrangeArgs<I> args) {
  const int64_t p = thread_id();
  if (p >= args.edges) return;
  const I from = args.order[p];
  args.to_rows[p] = args.rows[from];
  args.to_indices[p] = args.indices[from];
  args.to_ids[p] = args.edge_ids ? args.edge_ids[from] : from;
}

struct Larger {
  template <class I>
  __host__ __device__ I operator()(I a, I b) const {
    return a < b ? b : a;
  }
};

// The first edge of a run: its own position; of others nothing, for the largest before them to be found.
template <class I>
__global__ void run_begins_kernel(PiecesArgs<I> args) {
  const int64_t p = thread_id();
  if (p >= args.edges) return;
  const bool begins = p > 0 && (args.rows[p] != args.rows[p - 1] || args.types[p] != args.types[p - 1]);
  args.numbers[p] = begins ? static_cast<I>(p) : I(0);
}

template <class I>
__global__ void piece_begins_kernel(PiecesArgs<I> args) {
  const int64_t p = thread_id();
  if (p < args.edges) args.numbers[p] = (p - args.numbers[p]) % args.cut == 0;
}

template <class I>
__global__ void pieces_kernel(PiecesArgs<I> args) {
  const int64_t p = thread_id();
  if (p > args.edges) return;
  const I pieces = args.edges ? args.numbers[args.edges - 1] : I(0);
  if (p >= pieces) args.ptr[p] = static_cast<I>(args.edges);
  if (p == args.edges) *args.count = pieces;
  if (p == args.edges) return;
  if (p >= pieces) args.piece_rows[p] = static_cast<I>(args.num_rows);
  const I number = args.numbers[p] - 1;
  if (p == 0 || number != args.numbers[p - 1] - 1) {
    args.piece_rows[number] = args.rows[p];
    args.ptr[number] = static_cast<I>(p);
  }
}

template <class I>
__global__ void type_pieces_kernel(PiecesArgs<I> args) {
  const int64_t type = thread_id();
  if (type > args.num_types) return;
  const I first = args.type_begins[type];
  const I all = args.edges ? args.numbers[args.edges - 1] : I(0);
  args.type_ptr[type] = first < args.edges ? args.numbers[first] - 1 : all;
}

template <class I>
size_t scan_bytes(int64_t edges) {
  size_t maximum = 0, sum = 0;
  I* none = nullptr;
  cub::DeviceScan::InclusiveScan(nullptr, maximum, none, none, Larger{}, edges);
  cub::DeviceScan::InclusiveSum(nullptr, sum, none, none, edges);
  return maximum < sum ? sum : maximum;
}

// A pair may be several pieces, one behind the other.
template <class I, class A>
__device__ A mean_of_piece(const MeansArgs<I, A>& args, int64_t piece) {
  const int64_t type = first_behind(1, args.num_types, [&](int64_t t) { return args.type_ptr[t] > piece; }) - 1;
  const int64_t begin = args.type_ptr[type], last = args.type_ptr[type + 1];
  const I row = args.rows[piece];
  int64_t first = piece, end = piece + 1;
  if (first > begin && args.rows[first - 1] == row) {
    first = first_behind(begin, first, [&](int64_t i) { return args.rows[i] >= row; });
  }
  if (end < last && args.rows[end] == row) {
    end = first_behind(end, last, [&](int64_t i) { return args.rows[i] > row; });
  }
  return A(1) / static_cast<A>(args.ptr[end] - args.ptr[first]);
}

template <class I, class A>
__global__ void means_of_pieces_kernel(MeansArgs<I, A> args) {
  const int64_t piece = thread_id();
  if (piece < args.type_ptr[args.num_types]) args.means[piece] = mean_of_piece(args, piece);
}

// A warp for every piece.
template <class I, class A>
__global__ void means_kernel(MeansArgs<I, A> args) {
  const int64_t piece = thread_id() / kWarp;
  if (piece >= args.type_ptr[args.num_types]) return;
  const A mean = mean_of_piece(args, piece);
  for (int64_t e = args.ptr[piece] + threadIdx.x % kWarp; e < args.ptr[piece + 1]; e += kWarp) {
    args.means[args.edge_ids[e]] = mean;
  }
}

template <class I>
__global__ void pairs_kernel(const I* ptr, int64_t pairs, const I* edge_ids, int64_t edges, I* of_edges) {
  const int64_t e = thread_id();
  if (e >= edges) return;
  of_edges[edge_ids[e]] = static_cast<I>(first_behind(1, pairs, [=](int64_t pair) { return ptr[pair] > e; }) - 1);
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
