// Sums over all edges of g[e, c] attr[e, k] (EdgeProducts in edge_terms.h): the gradients of edge_proj and of gatv2's
// edge term.
//
// A block processes a range of the edges in tiles. Each thread has a few adjacent columns, whose sums stay in
// registers, and processes every n-th edge of a tile (n: `groups`); all threads read the tile's features from shared
// memory. gatv2's hidden values are recomputed from the rows of both ends, so nothing of size [edges, columns] is
// written. A later launch adds up the sums of the blocks in block order. In float arithmetic, gatv2 with an even number
// of channels uses edge_product_tiles.cuh instead.
#pragma once

#include "edge_products.h"
#include "edge_terms.h"
#include "edge_walk.cuh"

namespace edgeless::cuda {

constexpr int kAhead = 4;  // edges per thread whose rows are loaded at once

// Blocks have whole units of edges, and at most kUnit threads of a block share a column. So a thread adds up the same
// edges in the same order for any size of a tile: sums do not depend on whether the features' gradient is computed as
// well.
constexpr int kUnit = kEdgesOfUnit;
// Target occupancy in blocks per SM.
template <class A, int kNumbers>
constexpr int kBlocks = sizeof(A) == 8  ? 1
                        : kNumbers > 16 ? 2
                                        : 3;

// Stores the features' gradient of a tile, `features` values per edge. tile_of_g: [edges, in_block]; weighted:
// [in_block, kDim].
template <class S, int kDim, class A>
__device__ __forceinline__ void make_attr_grad(const EdgeProducts<A>& args, int64_t first, int count,
                                               const A* tile_of_g, const A* weighted, int in_block, int features) {
  constexpr int kFew = 4;  // features of a thread
  for (int at = threadIdx.x; at < count * (kDim / kFew); at += kThreads) {
    const int e = at / (kDim / kFew), k = at % (kDim / kFew) * kFew;
    A total[kFew] = {};
    for (int c = 0; c < in_block; ++c) {
      const A of_column = tile_of_g[e * in_block + c];
#pragma unroll
      for (int i = 0; i < kFew; ++i) total[i] = fma(of_column, weighted[c * kDim + k + i], total[i]);
    }
    S* to = static_cast<S*>(args.attr_grad) + id_of_edge(args.edges, first + e) * args.edges.dim + k;
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      if (k + i < features) to[i] = to_storage<S>(total[i]);
    }
  }
}

// kDim: features, padded with zeros. kColumns: columns per thread, all of one head. kHidden: gatv2. kAttrGrad: computes
// the features' gradient as well, with g of the tile and `weighted` in dynamic shared memory. width: threads per edge.
template <class S, int kDim, int kColumns, bool kHidden, bool kAttrGrad>
__global__ void __launch_bounds__(kThreads, kBlocks<Arithmetic<S>, kDim * kColumns>)
    edge_products_kernel(const __grid_constant__ EdgeProducts<Arithmetic<S>> args, int width) {
  using A = Arithmetic<S>;
  constexpr int kTile = edges_of_tile(kDim, sizeof(A), kAttrGrad);
  __shared__ __align__(16) A attr[kTile][kDim];
  __shared__ A sums[kThreads];
  __shared__ int64_t place[kTile];                  // index in ds of the edge's first head
  __shared__ int64_t of_dst[kTile], of_src[kTile];  // bytes from row 0
  extern __shared__ __align__(16) char dynamic[];
  A* tile_of_g = reinterpret_cast<A*>(dynamic);        // [kTile, width * kColumns]
  A* weighted = tile_of_g + kTile * width * kColumns;  // [width * kColumns, kDim]
  const EdgeFeatures& edges = args.edges;
  const int columns = edges.heads * args.channels, in_block = width * kColumns;
  const int first_feature = static_cast<int>(blockIdx.z) * kDim, features = min(kDim, edges.dim - first_feature);
  const int thread = threadIdx.x % width, group = threadIdx.x / width, groups = kThreads / width;
  const int column = static_cast<int>(blockIdx.y) * in_block + thread * kColumns;
  const bool inside = column < columns;
  const int some = inside ? column : 0, head = some / args.channels, number = some % args.channels;

  A w[kColumns][kDim], sum[kColumns][kDim] = {};
  const char *dst = nullptr, *src = nullptr;
  if constexpr (kHidden) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int k = 0; k < kDim; ++k) w[c][k] = k < features ? args.proj[(some + c) * edges.dim + k] : A(0);
    }
    dst = args.dst.base + head * args.dst.head + number * sizeof(S);
    src = args.src.base + head * args.src.head + number * sizeof(S);
  }
  if constexpr (kAttrGrad) {
    for (int at = threadIdx.x; at < in_block * kDim; at += kThreads) {
      const int c = at / kDim, k = at % kDim;
      weighted[at] = c < columns && k < features ? args.weighted[c * edges.dim + k] : A(0);
    }
  }

  const int64_t num_edges = edges_in_rows(edges.graph, edges.wide_index), units = (num_edges + kUnit - 1) / kUnit;
  const int64_t begin = units * blockIdx.x / gridDim.x * kUnit;
  const int64_t end = min(units * (blockIdx.x + 1) / gridDim.x * kUnit, num_edges);
  int64_t low = 0, high = 0;
  if (kHidden && begin < end) {
    const RowBounds bounds(edges.graph, edges.wide_index, begin, end);
    low = bounds.low, high = bounds.high;
  }
  for (int64_t first = begin; first < end; first += kTile) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kTile), end - first));
    __syncthreads();  // the previous tile has been read
    for (int at = threadIdx.x; at < kTile * kDim; at += kThreads) {
      const int e = at / kDim, k = at % kDim;
      const bool there = e < count && k < features;
      const int64_t id = there ? id_of_edge(edges, first + e) : 0;
      attr[e][k] =
          there ? to_arithmetic(__ldg(static_cast<const S*>(edges.attr) + id * edges.dim + first_feature + k)) : A(0);
    }
    for (int e = threadIdx.x; e < kTile; e += kThreads) {
      const int64_t position = first + min(e, count - 1);
      place[e] = (edges.by_position ? position : id_of_edge(edges, position)) * edges.heads;
      if constexpr (kHidden) {
        const int64_t row = row_of_edge(edges, position, low, high);
        of_dst[e] = row * args.dst.row;
        of_src[e] = index_at(edges.graph.indices, position, edges.wide_index) * args.src.row;
      }
    }
    __syncthreads();
    for (int some_edges = group; some_edges < count; some_edges += kAhead * groups) {
      A g[kAhead] = {}, x[kAhead][kColumns] = {}, y[kAhead][kColumns] = {};
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (u * groups >= kTile) break;
        const int e = some_edges + u * groups;
        g[u] = inside && e < count ? __ldg(args.ds + place[e] + head) : A(0);
        if constexpr (kHidden) {
          load_columns<S>(src + of_src[e], x[u]);
          load_columns<S>(dst + of_dst[e], y[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (u * groups >= kTile) break;
        const int e = some_edges + u * groups;
        A mine[kDim];
#pragma unroll
        for (int k = 0; k < kDim; ++k) mine[k] = attr[e][k];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          A of_column = g[u];
          if constexpr (kHidden) {
            A hidden = x[u][c] + y[u][c];
#pragma unroll
            for (int k = 0; k < kDim; ++k) hidden = fma(w[c][k], mine[k], hidden);
            if (!(hidden > 0)) of_column *= args.slope;
          }
#pragma unroll
          for (int k = 0; k < kDim; ++k) sum[c][k] = fma(of_column, mine[k], sum[c][k]);
          if constexpr (kAttrGrad) {
            tile_of_g[e * in_block + thread * kColumns + c] = of_column;
          }
        }
      }
    }
    if constexpr (kAttrGrad) {
      __syncthreads();
      make_attr_grad<S, kDim>(args, first, count, tile_of_g, weighted, in_block, features);
    }
    if constexpr (kHidden) low = row_of_edge(edges, first + count - 1, low, high);
  }

  // Adds up the sums of a column's threads in the order of the groups.
  A* partial = args.partial + (static_cast<int64_t>(blockIdx.x) * columns + some) * edges.dim + first_feature;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int k = 0; k < kDim; ++k) {
      __syncthreads();
      sums[threadIdx.x] = sum[c][k];
      __syncthreads();
      if (group > 0 || !inside || k >= features) continue;
      A total = 0;
      for (int g = 0; g < groups; ++g) total += sums[g * width + thread];
      partial[c * edges.dim + k] = total;
    }
  }
}

template <class S>
__global__ void hidden_gradients_kernel(const __grid_constant__ EdgeProducts<Arithmetic<S>> args, int64_t first,
                                        int64_t count, const void* dst_end, const void* src_end, Arithmetic<S>* term) {
  using A = Arithmetic<S>;
  const EdgeFeatures& edges = args.edges;
  const int64_t at = thread_id();
  const int channels = args.channels;
  if (at >= count * edges.heads * channels) return;
  const int64_t k = at % channels, head = at / channels % edges.heads, edge = first + at / channels / edges.heads;
  const int64_t own = index_at(dst_end, edge, edges.wide_index), other = index_at(src_end, edge, edges.wide_index);
  A x[1], y[1];
  load_columns<S>(args.src.base + head * args.src.head + k * sizeof(S) + other * args.src.row, x);
  load_columns<S>(args.dst.base + head * args.dst.head + k * sizeof(S) + own * args.dst.row, y);
  term[at] = args.ds[edge * edges.heads + head] * (x[0] + y[0] + term[at] > 0 ? A(1) : args.slope);
}

}  // namespace edgeless::cuda
