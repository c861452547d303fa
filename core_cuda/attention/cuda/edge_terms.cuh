// Products of edge features, [E, dim] by original id, with node rows; sums of such rows for the features' gradient;
// dropout factors and both ends of edges. A thread processes one edge and holds its features in registers; neighbouring
// threads, whose edges mostly share a row, read that row together.
#pragma once

#include "../../common/dropout.h"
#include "edge_terms.h"
#include "edge_walk.cuh"

namespace edgeless::cuda {

// kDim: the number of features, if they are whole vectors; 0: any number.
template <class S, int kDim>
__global__ void __launch_bounds__(kThreads) edge_dots_kernel(const __grid_constant__ EdgeDots<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kHeads = 4;  // heads per step
  const EdgeFeatures& edges = args.edges;
  const int heads = edges.heads, dim = kDim ? kDim : edges.dim;
  for_each_edge(edges.graph, edges.wide_index, args.one_row, [&](int64_t position, int64_t row) {
    const int64_t id = id_of_edge(edges, position), at = (edges.by_position ? position : id) * heads;
    const S* attr = static_cast<const S*>(edges.attr) + id * dim;
    A e[kDim ? kDim : 1];
    if constexpr (kDim > 0) Numbers<S, kDim>::load(attr, e);
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      if (!args.out[product]) break;
      const A* rows = args.rows[product] + row * heads * dim;
      A* out = args.out[product] + at;
      for (int first = 0; first < heads; first += kHeads) {
        A dot[kHeads] = {};
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (first + h >= heads) break;
          const A* x = rows + (first + h) * dim;
          if constexpr (kDim > 0) {
            A own[kDim];
            Numbers<A, kDim>::load(x, own);
#pragma unroll
            for (int k = 0; k < kDim; ++k) dot[h] = fma(own[k], e[k], dot[h]);
          } else {
            for (int k = 0; k < dim; ++k) dot[h] = fma(__ldg(x + k), to_arithmetic(__ldg(attr + k)), dot[h]);
          }
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) dot[h] *= args.factor[product];
        if (heads % kHeads == 0) {
          Numbers<A, kHeads>::store(out + first, dot);
        } else {
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            if (first + h < heads) out[first + h] = dot[h];
          }
        }
      }
    }
  });
}

template <class S, int kDim>
__global__ void __launch_bounds__(kThreads) edge_sums_kernel(const __grid_constant__ EdgeSums<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kSome = kDim ? kDim : 4;  // features per step
  const EdgeFeatures& edges = args.edges;
  const int heads = edges.heads, dim = kDim ? kDim : edges.dim;
  for_each_edge(edges.graph, edges.wide_index, args.one_row, [&](int64_t position, int64_t row) {
    const int64_t id = id_of_edge(edges, position), at = (edges.by_position ? position : id) * heads;
    S* out = static_cast<S*>(args.out) + id * dim;
    for (int first = 0; first < dim; first += kSome) {
      A sum[kSome] = {};
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        if (!args.weight[part]) break;
        for (int h = 0; h < heads; ++h) {
          const A weight = __ldg(args.weight[part] + at + h);
          const A* x = args.rows[part] + (row * heads + h) * dim + first;
          A own[kSome];
          if constexpr (kDim > 0) {
            Numbers<A, kDim>::load(x, own);
          } else {
#pragma unroll
            for (int k = 0; k < kSome; ++k) own[k] = first + k < dim ? __ldg(x + k) : A(0);
          }
#pragma unroll
          for (int k = 0; k < kSome; ++k) sum[k] = fma(weight, own[k], sum[k]);
        }
      }
      if constexpr (kDim > 0) {
        Numbers<S, kDim>::store(out, sum);
      } else {
#pragma unroll
        for (int k = 0; k < kSome; ++k) {
          if (first + k < dim) out[first + k] = to_storage<S>(sum[k]);
        }
      }
    }
  });
}

// A thread makes one draw, which serves four heads of an edge.
template <class A>
__global__ void edge_drops_kernel(const __grid_constant__ EdgeDrops<A> args) {
  const EdgeFeatures& edges = args.edges;
  const int heads = edges.heads, draws = (heads + 3) / 4;
  const int64_t position = thread_id() / draws;
  const int draw = static_cast<int>(thread_id() % draws);
  if (position >= edges_in_rows(edges.graph, edges.wide_index)) return;
  const int64_t id = id_of_edge(edges, position);
  const Philox4 drawn = philox(static_cast<uint64_t>(*args.seed), static_cast<uint64_t>(id), draw);
  A* out = args.out + (edges.by_position ? position : id) * heads + draw * 4;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (draw * 4 + k < heads) out[k] = drawn.lane[k] >= args.threshold ? args.keep_scale : A(0);
  }
}

template <class I>
__global__ void ends_of_edges_kernel(const __grid_constant__ EdgeFeatures edges, I* dst, I* src) {
  for_each_edge(edges.graph, edges.wide_index, false, [&](int64_t position, int64_t row) {
    const int64_t id = id_of_edge(edges, position);
    dst[id] = static_cast<I>(row);
    src[id] = static_cast<const I*>(edges.graph.indices)[position];
  });
}

}  // namespace edgeless::cuda
