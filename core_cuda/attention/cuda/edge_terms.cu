// Launches the kernels of edge_terms.cuh.
#include "edge_terms.cuh"

#include <cstdint>
#include <initializer_list>

#include "../../common/with_storage.cuh"
#include "edge_terms.h"

namespace edgeless::cuda {
namespace {

// Calls f(Dim<n>) for n features where all arrays can be read in whole vectors, else f(Dim<0>).
template <class F>
void with_dim_of(const EdgeFeatures& edges, std::initializer_list<const void*> arrays, F&& f) {
  bool whole = true;
  for (const void* array : arrays) whole = whole && reinterpret_cast<uintptr_t>(array) % 16 == 0;
  switch (whole ? edges.dim : 0) {
    case 4: return f(Dim<4>{});
    case 8: return f(Dim<8>{});
    case 16: return f(Dim<16>{});
    case 32: return f(Dim<32>{});
    default: return f(Dim<0>{});
  }
}

}  // namespace

template <class A>
cudaError_t edge_dots(const EdgeDots<A>& args, cudaStream_t stream) {
  if (args.edges.graph.num_edges * args.edges.heads == 0) return cudaSuccess;
  return with_storage<A>(args.edges.storage, [&](auto zero) {
    using S = decltype(zero);
    with_dim_of(args.edges, {args.edges.attr, args.rows[0], args.rows[1]}, [&](auto dim) {
      edge_dots_kernel<S, decltype(dim)::value><<<blocks_for_edges(args.edges.graph), kThreads, 0, stream>>>(args);
    });
  });
}

template <class A>
cudaError_t edge_sums(const EdgeSums<A>& args, cudaStream_t stream) {
  if (args.edges.graph.num_edges * args.edges.dim == 0) return cudaSuccess;
  return with_storage<A>(args.edges.storage, [&](auto zero) {
    using S = decltype(zero);
    with_dim_of(args.edges, {args.out, args.rows[0], args.rows[1]}, [&](auto dim) {
      edge_sums_kernel<S, decltype(dim)::value><<<blocks_for_edges(args.edges.graph), kThreads, 0, stream>>>(args);
    });
  });
}

template <class A>
cudaError_t edge_drops(const EdgeDrops<A>& args, cudaStream_t stream) {
  const int64_t threads = args.edges.graph.num_edges * ((args.edges.heads + 3) / 4);
  if (threads == 0) return cudaSuccess;
  edge_drops_kernel<A><<<blocks_for(threads), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t ends_of_edges(const EdgeFeatures& edges, void* dst, void* src, cudaStream_t stream) {
  if (edges.graph.num_edges == 0) return cudaSuccess;
  const auto run = [&](auto zero) {
    using I = decltype(zero);
    ends_of_edges_kernel<I>
        <<<blocks_for_edges(edges.graph), kThreads, 0, stream>>>(edges, static_cast<I*>(dst), static_cast<I*>(src));
  };
  edges.wide_index ? run(int64_t{}) : run(int32_t{});
  return cudaGetLastError();
}

template cudaError_t edge_dots(const EdgeDots<float>&, cudaStream_t);
template cudaError_t edge_dots(const EdgeDots<double>&, cudaStream_t);
template cudaError_t edge_sums(const EdgeSums<float>&, cudaStream_t);
template cudaError_t edge_sums(const EdgeSums<double>&, cudaStream_t);
template cudaError_t edge_drops(const EdgeDrops<float>&, cudaStream_t);
template cudaError_t edge_drops(const EdgeDrops<double>&, cudaStream_t);

}  // namespace edgeless::cuda
