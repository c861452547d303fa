// What an edge weighs in a product.
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

// What the edges of a lane weigh, window by window of a team's walk. A window's weights are asked for one window ahead,
// and the ids that say where they are two ahead: so no window waits for one after the other.
template <class A, class I>
struct WeightsAhead {
  const SpmmArgs<A>& args;
  I last = 0;      // edge of the walk: behind it nothing is asked for
  I position = 0;  // of the lane's edge in this window
  A next = 1;      // its weight, without the scale of columns, which needs an index
  I id = 0;        // of its edge in the next window

  __device__ explicit WeightsAhead(const SpmmArgs<A>& args) : args(args) {}

  // first: the lane's edge in the first window; end: of the walk, behind at least one edge.
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

  // Once the window's first rows are asked for: the ids are there by then.
  __device__ __forceinline__ void advance() {
    load();
    id = id_of(further(position, 2 * width()));
  }

 private:
  __device__ __forceinline__ I width() const { return I(1) << args.plan.team_log2; }
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
