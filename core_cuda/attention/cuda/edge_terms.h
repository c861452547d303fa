// Entry points of the kernels for edge features that run before and after the passes of attention. No CUDA and no
// torch.
//
// All of them process the edges in the order of the graph, row by row. Features are indexed by original edge id. Other
// per-edge arrays are indexed by id as well or, with by_position, by CSR position, which needs no lookup.
#pragma once

#include "../../jit/queue.h"
#include "args.h"

namespace edgeless::cuda {

struct EdgeFeatures {
  CompressedGraph graph;
  bool wide_index = false;
  bool by_position = false;    // per-edge arrays other than attr are indexed by CSR position
  const void* attr = nullptr;  // [E, dim] of the storage dtype
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
  bool one_row = false;  // rows are [heads, dim], the same for all edges
};
template <class A>
void edge_dots(const EdgeDots<A>& args, const jit::Queue& queue);

// out[e] = sum over the heads h of weight[0][e, h] rows[0][r, h] + weight[1][e, h] rows[1][r, h] for every edge e of
// row r: a gradient of the features, by id.
template <class A>
struct EdgeSums {
  EdgeFeatures edges;       // attr is not read
  const A* weight[2] = {};  // [E, heads]; the second may be null
  const A* rows[2] = {};    // [rows, heads, dim]
  bool one_row = false;     // see EdgeDots
  void* out = nullptr;      // [E, dim] of the storage dtype
};
template <class A>
void edge_sums(const EdgeSums<A>& args, const jit::Queue& queue);

// out[e, h]: the dropout factor of an edge and head, 0 or keep_scale = 1 / (1 - p). Draws depend on the original id.
template <class A>
struct EdgeDrops {
  EdgeFeatures edges;  // attr is not read
  const int64_t* seed = nullptr;
  uint64_t threshold = 0;
  A keep_scale = 1;
  A* out = nullptr;  // [E, heads]
};
template <class A>
void edge_drops(const EdgeDrops<A>& args, const jit::Queue& queue);

// sums[c, k] = sum over the edges e of g[e, c] attr[e, k]. Without `proj` a column c is a head h, and g[e, c] = ds[e,
// h]. With `proj` (gatv2, at most kMostHidden features) a column is a channel of a head, and g[e, c] = ds[e, h]
// LeakyReLU'(dst + src + <proj[c], attr[e]>). Then the features' gradient, sum over c of g[e, c] weighted[c, k], may be
// computed as well where makes_attr_grad() holds.
constexpr int kMostHidden = 32;
// A block gets a multiple of kEdgesOfUnit edges; the grid has kBlocksOfProducts blocks per SM.
constexpr int kEdgesOfUnit = 64, kBlocksOfProducts = 4;
template <class A>
struct EdgeProducts {
  EdgeFeatures edges;
  const A* ds = nullptr;  // [E, heads]
  Rows dst, src;          // gatv2
  int channels = 1;       // columns per head
  A slope = 0;
  const A* proj = nullptr;      // [columns, dim]; null: columns are heads
  const A* weighted = nullptr;  // [columns, dim]; null: no gradient of features
  void* attr_grad = nullptr;    // [E, dim] of the storage dtype
  int blocks = 0;
  A* partial = nullptr;  // [blocks, columns, dim]; the caller sums over the blocks
};
// Returns whether edge_products() can compute the features' gradient: a block's shared memory holds all columns.
template <class A>
bool makes_attr_grad(int heads, int channels);
template <class A>
void edge_products(const EdgeProducts<A>& args, const jit::Queue& queue);

// Writes the destination and the source of every edge, by id.
void ends_of_edges(const EdgeFeatures& edges, void* dst, void* src, const jit::Queue& queue);

// Replaces term[e, c] = <proj[c], attr[e]> by g[e, c] (see EdgeProducts) for the `count` edges from id `first` on.
// dst_end, src_end: both ends of every edge, by id.
template <class A>
void hidden_gradients(const EdgeProducts<A>& args, int64_t first, int64_t count, const void* dst_end,
                      const void* src_end, A* term, const jit::Queue& queue);

}  // namespace edgeless::cuda
