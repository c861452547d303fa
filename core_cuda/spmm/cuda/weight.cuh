// Edge weights of an SpMM.
#pragma once

#include "args.h"

namespace edgeless::cuda::spmm {

template <class A, class I>
__device__ __forceinline__ A edge_weight(const SpmmArgs<A>& args, I index, I position, int head) {
  A w = args.column_scale ? __ldg(args.column_scale + index) : A(1);
  if (args.weight) {
    const I* ids = static_cast<const I*>(args.graph.edge_ids);
    const int64_t id = ids ? static_cast<int64_t>(__ldcs(ids + position)) : static_cast<int64_t>(position);
    w *= __ldg(args.weight + id * args.weight_edge + head * args.weight_head);
  }
  return w;
}

// The weights of a lane's edges, window by window of the sub-warp's tile loop. Weights are prefetched one window ahead
// and the edge ids that index them two windows ahead, so that no window waits for the two dependent loads.
template <class A, class I>
struct WeightsAhead {
  const SpmmArgs<A>& args;
  I last = 0;      // last edge of the tile loop; prefetches are clamped to it
  I position = 0;  // CSR position of the lane's edge in this window
  A next = 1;      // weight[id] of the next edge to take, without column_scale, which needs the edge's source
  I id = 0;        // edge id of the weight to prefetch next

  __device__ explicit WeightsAhead(const SpmmArgs<A>& args) : args(args) {}

  // first: the lane's edge in the first window; end: end of the tile loop, which has at least one edge.
  __device__ __forceinline__ void begin(I first, I end) {
    last = end - 1;
    id = id_of(min(first, last));
    load();
    id = id_of(further(first, width()));
  }

  // The weight of the lane's edge in this window.
  __device__ __forceinline__ A take(I index, I at) {
    position = at;
    return args.column_scale ? next * __ldg(args.column_scale + index) : next;
  }

  // Prefetches the next window's weights. Called after the window's first rows are requested: the ids have arrived by
  // then.
  __device__ __forceinline__ void advance() {
    load();
    id = id_of(further(position, 2 * width()));
  }

 private:
  __device__ __forceinline__ I width() const { return I(1) << args.plan.sub_warp_log2; }
  __device__ __forceinline__ I further(I from, I by) const { return last - from < by ? last : from + by; }
  __device__ __forceinline__ I id_of(I at) const {
    const I* ids = static_cast<const I*>(args.graph.edge_ids);
    return args.weight && ids ? __ldcs(ids + at) : at;
  }
  __device__ __forceinline__ void load() {
    if (args.weight) next = __ldg(args.weight + id * args.weight_edge);
  }
};

}  // namespace edgeless::cuda::spmm
