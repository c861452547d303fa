// SDDMM: products[e] = <own[r], x[c]> row_scale[r] column_scale[c] for every edge e = (c, r), by original edge id.
//
// A block owns a range of the graph for one head (common/partition.cuh), each of its teams an equal share. A team holds
// its row and takes up to four of that row's edges at a time: their dot products meet in the lanes that own the edges
// (common/warp.cuh). Indices are asked for a batch ahead, and what an edge needs at its end together with its rows. No
// two teams write the same edge, so there is nothing to merge. Heads of one vector take a thread for an edge.
#pragma once

#include "../../common/fold.cuh"
#include "../../common/row_of_edge.cuh"
#include "../../common/warp.cuh"
#include "kernels.h"

namespace edgeless::cuda::spmm {

template <class S, class I, int kVecs>
__global__ void __launch_bounds__(kFoldThreads) sddmm_kernel(const __grid_constant__ SddmmArgs<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kPer = kNumbers<S, 4>, kEdges = 4;  // kEdges: of a batch
  __shared__ FoldShares<I> s;
  const I* indptr = static_cast<const I*>(args.graph.indptr);
  const I* indices = static_cast<const I*>(args.graph.indices);
  const I* ids = static_cast<const I*>(args.graph.edge_ids);
  const int width = 1 << args.team_log2, lane = threadIdx.x & (width - 1), team = threadIdx.x >> args.team_log2;
  const int slot = lane & (kEdges - 1), head = blockIdx.y;
  divide_range(args.graph, args.part, Chains{kFoldThreads >> args.team_log2}, s);
  const Cut<I> from = s.cuts[team], to = s.cuts[team + 1];

  bool inside[kVecs];
  const char *own_base[kVecs], *base[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int vector = v * width + lane;
    inside[v] = vector < args.vectors;
    const int64_t offset = int64_t(args.first_vector + (inside[v] ? vector : 0)) * 16;
    own_base[v] = args.own.base + head * args.own.head + offset;
    base[v] = args.x.base + head * args.x.head + offset;
  }

  const I last = to.edge;
  I row = from.row, at = from.edge;
  A own[kVecs][kPer], row_scale = 1;
  auto begin_row = [&] {
    while (at < last && indptr[row + 1] == at) ++row;
    if (at >= last) return at;
    row_scale = args.row_scale ? args.row_scale[row] : A(1);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      unpack_words<S, 4>(
          load_shared_words(reinterpret_cast<const Words<4>*>(row_address(own_base[v], row, args.own.row))), own[v]);
    }
    return min(indptr[row + 1], last);
  };
  I row_end = begin_row();
  const I end_of_all = static_cast<I>(args.graph.num_edges - 1);
  I ahead = __ldg(indices + min(at + slot, end_of_all));
  while (__any_sync(kFullWarp, at < last)) {
    const int n = static_cast<int>(min(static_cast<I>(kEdges), static_cast<I>(row_end - at)));
    const int place = max(0, min(slot, n - 1));
    const I index = __shfl_sync(kFullWarp, ahead, (lane & ~(kEdges - 1)) + place, width);
    const I position = min(at + place, end_of_all);
    ahead = __ldg(indices + min(at + n + slot, end_of_all));
    A partial[kEdges] = {};
    Words<4> raw[kEdges][kVecs];
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      const I j = from_owner<kEdges>(index, u);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        raw[u][v] = load_shared_words(reinterpret_cast<const Words<4>*>(row_address(base[v], j, args.x.row)));
      }
    }
    const int64_t id = ids ? static_cast<int64_t>(__ldcs(ids + position)) : static_cast<int64_t>(position);
    const A scale = args.column_scale ? row_scale * args.column_scale[index] : row_scale;
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        A x[kPer];
        unpack_words<S, 4>(raw[u][v], x);
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          if (inside[v]) partial[u] = fma(own[v][k], x[k], partial[u]);
        }
      }
    }
    const A dot = sum_of_own_edge(partial, lane, width);
    if (lane < n) {  // the first four lanes of a team own one edge each
      A* to_product = args.products + id * args.heads + head;
      *to_product = args.add ? *to_product + dot * scale : dot * scale;
    }
    at += n;
    if (at == row_end && at < last) row_end = begin_row();
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
      const auto load = [&](const FoldRows& from, I of, A(&x)[kPer]) {
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

template <class S, class I>
cudaError_t launch_sddmm(const SddmmArgs<Arithmetic<S>>& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.part.num_ranges), static_cast<unsigned>(args.heads));
  if (args.vectors == 1 && args.first_vector == 0) {
    sddmm_few_kernel<S, I><<<blocks_for_edges(args.graph), kThreads, 0, stream>>>(args);
  } else if (args.vectors <= 32) {
    sddmm_kernel<S, I, 1><<<grid, kFoldThreads, 0, stream>>>(args);
  } else {
    sddmm_kernel<S, I, kMostSddmmVectors / 32><<<grid, kFoldThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class S>
cudaError_t sddmm_instance(bool wide_index, const SddmmArgs<Arithmetic<S>>& args, cudaStream_t stream) {
  return wide_index ? launch_sddmm<S, int64_t>(args, stream) : launch_sddmm<S, int32_t>(args, stream);
}

}  // namespace edgeless::cuda::spmm
