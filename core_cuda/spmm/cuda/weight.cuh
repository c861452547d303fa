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

}  // namespace edgeless::cuda::spmm
