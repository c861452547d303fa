// SDDMM: products[e] = <own[r], x[c]> row_scale[r] column_scale[c] for every edge e = (c, r), by original edge id.
//
// A warp processes 32 consecutive edges, whatever rows they belong to. Each lane owns one edge: it finds the edge's end
// points and finally holds its product. Sub-warps of one lane per vector of a head process four edges at a time, and
// the dot products are reduced into the lanes that own the edges (common/warp.cuh). The destination row is reloaded for
// each edge: it hits L1, and no edge waits for another edge's row (0063). Heads of one vector use one thread per edge.
#pragma once

#include "../../common/row_of_edge.cuh"
#include "../../common/warp.cuh"
#include "../../common/words.cuh"
#include "args.h"

namespace edgeless::cuda::spmm {

// kOne: a head has no more vectors than a sub-warp has lanes.
template <class S, class I, bool kOne>
__global__ void __launch_bounds__(kThreads, 4) sddmm_kernel(const __grid_constant__ SddmmArgs<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  using Vector = Words<4>;
  constexpr int kPer = kNumbers<S, 4>, kEdges = 4;
  constexpr bool kWide = sizeof(I) == 8;
  const int width = 1 << args.sub_warp_log2, lane = threadIdx.x % 32, in_sub_warp = lane & (width - 1),
            head = blockIdx.y;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * args.edges_of_block;
  const int64_t end = min(begin + args.edges_of_block, edges_in_rows(args.graph, kWide));
  if (begin >= end) return;
  const RowBounds rows(args.graph, kWide, begin, end);
  const int64_t first_vector = in_sub_warp < args.vectors ? in_sub_warp * 16 : 0;
  const char* const own_base = args.own.base + head * args.own.head + first_vector;
  const char* const base = args.x.base + head * args.x.head + first_vector;
  for (int64_t first = begin + (threadIdx.x & ~31u); first < end; first += kThreads) {
    const int64_t position = min(first + lane, end - 1);
    const I index = __ldg(static_cast<const I*>(args.graph.indices) + position);
    const I row = static_cast<I>(row_of_edge(args.graph, kWide, position, rows.low, rows.high));
    A product = 0;
    for (int batch = 0; batch < width; batch += kEdges) {  // a sub-warp processes the edges its lanes own
      const int owner = lane - in_sub_warp + batch;        // lane that owns the first edge of the batch
      A partial[kEdges] = {};
      // Adds the products of one vector per lane, `offset` bytes behind the lane's first. Called by whole warps.
      const auto add = [&](int offset, bool inside) {
        Vector other[kEdges], own[kEdges];
#pragma unroll
        for (int u = 0; u < kEdges; ++u) {
          const I j = __shfl_sync(kFullWarp, index, owner + u), i = __shfl_sync(kFullWarp, row, owner + u);
          const char *of_column = row_address(base + offset, j, args.x.row),
                     *of_row = row_address(own_base + offset, i, args.own.row);
          other[u] = load_shared_words(reinterpret_cast<const Vector*>(of_column));
          own[u] = load_shared_words(reinterpret_cast<const Vector*>(of_row));
        }
        if (!inside) return;
#pragma unroll
        for (int u = 0; u < kEdges; ++u) {
          A x[kPer], y[kPer];
          unpack_words<S, 4>(other[u], x);
          unpack_words<S, 4>(own[u], y);
#pragma unroll
          for (int k = 0; k < kPer; ++k) partial[u] = fma(y[k], x[k], partial[u]);
        }
      };
      if constexpr (kOne) {
        add(0, in_sub_warp < args.vectors);
      } else {
        for (int vector = 0; vector < args.vectors; vector += width) {
          const bool inside = vector + in_sub_warp < args.vectors;
          add(inside ? vector * 16 : 0, inside);
        }
      }
      const A dot = sum_of_own_edge(partial, lane, width);
      if (in_sub_warp - in_sub_warp % kEdges == batch) product = dot;
    }
    if (first + lane >= end) continue;
    const A row_scale = args.row_scale ? args.row_scale[row] : A(1);
    const A scale = args.column_scale ? row_scale * args.column_scale[index] : row_scale;
    args.products[id_of_edge(args.graph, kWide, position) * args.heads + head] = product * scale;
  }
}

template <class S, class I>
__global__ void __launch_bounds__(kThreads) sddmm_few_kernel(const __grid_constant__ SddmmArgs<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kPer = kNumbers<S, 4>;
  constexpr bool kWide = sizeof(I) == 8;
  for_each_edge(args.graph, kWide, false, [&](int64_t position, int64_t found) {
    const I index = __ldcs(static_cast<const I*>(args.graph.indices) + position), row = static_cast<I>(found);
    const int64_t id = id_of_edge(args.graph, kWide, position);
    const A row_scale = args.row_scale ? args.row_scale[row] : A(1);
    const A scale = args.column_scale ? row_scale * args.column_scale[index] : row_scale;
    for (int head = 0; head < args.heads; ++head) {
      const auto load = [&](const ReduceRows& from, I of, A(&x)[kPer]) {
        const char* at = row_address(from.base + head * from.head, of, from.row);
        unpack_words<S, 4>(load_shared_words(reinterpret_cast<const Words<4>*>(at)), x);
      };
      A own[kPer], x[kPer], dot = 0;
      load(args.own, row, own);
      load(args.x, index, x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) dot = fma(own[k], x[k], dot);
      args.products[id * args.heads + head] = dot * scale;
    }
  });
}

}  // namespace edgeless::cuda::spmm
