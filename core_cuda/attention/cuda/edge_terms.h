// What edge features add to attention, by edge: the entries of the kernels around the passes. No torch.
//
// All of them walk the edges in the order of the graph, row by row. The features stand by original id. Other arrays of
// edges do so too, or in the order of the graph (by_position), which nobody has to look up.
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"

namespace edgeless::cuda {

struct EdgeFeatures {
  CompressedGraph graph;
  bool wide_index = false;
  bool by_position = false;    // arrays of edges other than the features
  const void* attr = nullptr;  // [E, dim] of storage
  Storage storage = Storage::f32;
  int dim = 0, heads = 0;
};

// out[e, h] = factor <rows[r, h], attr[e]> for every edge e of row r: one product, or two of the same features.
template <class A>
struct EdgeDots {
  EdgeFeatures edges;
  const A* rows[2] = {};  // [rows, heads, dim]
  A factor[2] = {1, 1};
  A* out[2] = {};        // [E, heads]; the second may be null
  bool one_row = false;  // rows are [heads, dim], the same for all
};
template <class A>
cudaError_t edge_dots(const EdgeDots<A>& args, cudaStream_t stream);

// out[e] = sum over the heads of a[e, h] x[r, h] + b[e, h] y[r, h]: a gradient of the features, by id.
template <class A>
struct EdgeSums {
  EdgeFeatures edges;       // without attr
  const A* weight[2] = {};  // [E, heads]; the second may be null
  const A* rows[2] = {};    // [rows, heads, dim]
  bool one_row = false;     // as above
  void* out = nullptr;      // [E, dim] of storage
};
template <class A>
cudaError_t edge_sums(const EdgeSums<A>& args, cudaStream_t stream);

// out[e, h]: what dropout multiplies an edge by, 0 or keep_scale = 1 / (1 - p). Drawn by original id.
template <class A>
struct EdgeDrops {
  EdgeFeatures edges;  // without attr
  const int64_t* seed = nullptr;
  uint64_t threshold = 0;
  A keep_scale = 1;
  A* out = nullptr;  // [E, heads]
};
template <class A>
cudaError_t edge_drops(const EdgeDrops<A>& args, cudaStream_t stream);

// sums[c, k] = sum over the edges of g[e, c] attr[e, k]. A column c is a head, and g is ds[e, h]. Or, of gatv2, it is a
// number of one, and g = ds[e, h] LeakyReLU'(dst + src + <proj[c], attr[e]>), of as many features as kMostHidden; then
// the features' gradient, sum over c of g[e, c] weighted[c, k], may be made as well where makes_attr_grad() says so.
constexpr int kMostHidden = 32;
// A block has a whole number of so many edges. Blocks are so many for a multiprocessor.
constexpr int kEdgesOfUnit = 64, kBlocksOfProducts = 4;
template <class A>
struct EdgeProducts {
  EdgeFeatures edges;
  const A* ds = nullptr;  // [E, heads]
  Rows dst, src;          // of gatv2
  int channels = 1;       // columns of a head
  A slope = 0;
  const A* proj = nullptr;      // [columns, dim], null: columns are heads
  const A* weighted = nullptr;  // [columns, dim], null: no gradient of features
  void* attr_grad = nullptr;    // [E, dim] of storage
  int blocks = 0;
  A* partial = nullptr;  // [blocks, columns, dim], whose sum over the blocks is the result
};
// Whether a block's shared memory holds all columns of a tile.
template <class A>
bool makes_attr_grad(int heads, int channels);
template <class A>
cudaError_t edge_products(const EdgeProducts<A>& args, cudaStream_t stream);

// Both ends of every edge, by id.
cudaError_t ends_of_edges(const EdgeFeatures& edges, void* dst, void* src, cudaStream_t stream);

// term[e, c], the product <proj[c], attr[e]> of the edges first .. first + count by id, becomes g[e, c], see above.
template <class A>
cudaError_t hidden_gradients(const EdgeProducts<A>& args, int64_t first, int64_t count, const void* dst_end,
                             const void* src_end, A* term, cudaStream_t stream);

}  // namespace edgeless::cuda
