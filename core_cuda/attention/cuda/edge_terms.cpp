// Launches the kernels of edge_terms.cuh, edge_products.cuh and edge_product_tiles.cuh.
#include "edge_terms.h"

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "../../common/kernel_types.h"
#include "../../jit/launch.h"
#include "edge_products.h"

namespace edgeless::cuda {
namespace {

constexpr const char* kTerms = "attention/cuda/edge_terms.cuh";
constexpr const char* kProducts = "attention/cuda/edge_products.cuh";

// The number of features if kernels are compiled for it and all arrays can be read in whole vectors, else 0.
int known_dim(const EdgeFeatures& edges, std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0) return 0;
  }
  const int dim = edges.dim;
  return dim == 4 || dim == 8 || dim == 16 || dim == 32 ? dim : 0;
}

// dim: features of the kernel, padded.
template <class A>
void launch_products(const EdgeProducts<A>& args, int dim, int columns_of_thread, const jit::Queue& queue) {
  const bool hidden = args.proj, attr_grad = hidden && args.weighted;
  const int columns = args.edges.heads * args.channels, width = threads_of_edge(columns, columns_of_thread);
  const int all = width * columns_of_thread;
  const jit::Expression kernel(kProducts, "edge_products_kernel",
                               {type_of(args.edges.storage), dim, columns_of_thread, hidden, attr_grad});
  const jit::Size grid(args.blocks, (columns + all - 1) / all, (args.edges.dim + dim - 1) / dim);
  const int64_t bytes = attr_grad ? bytes_of_products(dim, all, sizeof(A)) : 0;
  jit::launch(queue, kernel, {grid, kThreads, bytes}, args, width);
}

void launch_tiles(const EdgeProducts<float>& args, int dim, const jit::Queue& queue) {
  const bool attr_grad = args.weighted;
  const int columns = args.edges.heads * args.channels, width = warps_of_edge(columns), all = width * kTileColumns;
  const jit::Expression kernel("attention/cuda/edge_product_tiles.cuh", "edge_tiles_kernel",
                               {type_of(args.edges.storage), dim, attr_grad});
  const int64_t bytes = attr_grad ? bytes_of_tiles(dim, all) : 0;
  jit::launch(queue, kernel, {{args.blocks, (columns + all - 1) / all}, kThreads, bytes}, args, width);
}

}  // namespace

template <class A>
void edge_dots(const EdgeDots<A>& args, const jit::Queue& queue) {
  const EdgeFeatures& edges = args.edges;
  if (edges.graph.num_edges * edges.heads == 0) return;
  const int dim = known_dim(edges, {edges.attr, args.rows[0], args.rows[1]});
  const jit::Expression kernel(kTerms, "edge_dots_kernel", {type_of(edges.storage), dim});
  jit::launch(queue, kernel, {blocks_for_edges(edges.graph), kThreads}, args);
}

template <class A>
void edge_sums(const EdgeSums<A>& args, const jit::Queue& queue) {
  const EdgeFeatures& edges = args.edges;
  if (edges.graph.num_edges * edges.dim == 0) return;
  const int dim = known_dim(edges, {args.out, args.rows[0], args.rows[1]});
  const jit::Expression kernel(kTerms, "edge_sums_kernel", {type_of(edges.storage), dim});
  jit::launch(queue, kernel, {blocks_for_edges(edges.graph), kThreads}, args);
}

template <class A>
void edge_drops(const EdgeDrops<A>& args, const jit::Queue& queue) {
  const int64_t threads = args.edges.graph.num_edges * ((args.edges.heads + 3) / 4);
  if (threads == 0) return;
  jit::launch(queue, {kTerms, "edge_drops_kernel", {type_of<A>()}}, {blocks_for(threads), kThreads}, args);
}

void ends_of_edges(const EdgeFeatures& edges, void* dst, void* src, const jit::Queue& queue) {
  if (edges.graph.num_edges == 0) return;
  const jit::Expression kernel(kTerms, "ends_of_edges_kernel", {index_type(edges.wide_index)});
  jit::launch(queue, kernel, {blocks_for_edges(edges.graph), kThreads}, edges, dst, src);
}

template <class A>
bool makes_attr_grad(int heads, int channels) {
  constexpr int kMostBytes = 48 << 10;
  const int columns = heads * channels, all = threads_of_edge(columns, 1);  // the same for any columns per thread
  return columns <= all && bytes_of_products(kMostHidden, all, sizeof(A)) <= kMostBytes;
}

template <class A>
void edge_products(const EdgeProducts<A>& args, const jit::Queue& queue) {
  const int dim = args.edges.dim <= 8 ? 8 : args.edges.dim <= 16 ? 16 : kMostHidden;
  if (!args.proj) return launch_products(args, dim, 1, queue);
  if constexpr (std::is_same_v<A, float>) {
    if (args.channels % 2 == 0) return launch_tiles(args, dim, queue);
    launch_products(args, dim, 1, queue);
  } else {
    const int columns_of_thread = kMostHidden / dim;
    launch_products(args, dim, args.channels % columns_of_thread == 0 ? columns_of_thread : 1, queue);
  }
}

template <class A>
void hidden_gradients(const EdgeProducts<A>& args, int64_t first, int64_t count, const void* dst_end,
                      const void* src_end, A* term, const jit::Queue& queue) {
  const int64_t threads = count * args.edges.heads * args.channels;
  if (threads == 0) return;
  const jit::Expression kernel(kProducts, "hidden_gradients_kernel", {type_of(args.edges.storage)});
  jit::launch(queue, kernel, {blocks_for(threads), kThreads}, args, first, count, dst_end, src_end, term);
}

#define EDGELESS_INSTANTIATE(A)                                                                          \
  template void edge_dots(const EdgeDots<A>&, const jit::Queue&);                                        \
  template void edge_sums(const EdgeSums<A>&, const jit::Queue&);                                        \
  template void edge_drops(const EdgeDrops<A>&, const jit::Queue&);                                      \
  template bool makes_attr_grad<A>(int, int);                                                            \
  template void edge_products(const EdgeProducts<A>&, const jit::Queue&);                                \
  template void hidden_gradients(const EdgeProducts<A>&, int64_t, int64_t, const void*, const void*, A*, \
                                 const jit::Queue&);
EDGELESS_INSTANTIATE(float)
EDGELESS_INSTANTIATE(double)
#undef EDGELESS_INSTANTIATE

}  // namespace edgeless::cuda
