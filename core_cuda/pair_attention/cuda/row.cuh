// Rows and batches of edges in both passes over pairs.
#pragma once

#include "../../attention/cuda/edge_data.cuh"
#include "../../attention/cuda/scores.cuh"
#include "kernels.h"

namespace edgeless::cuda {

// Loads the lane's part of a parameter vector, padded with zeros.
template <class S, class P>
__device__ __forceinline__ void load_parameters(const void* vector, const P& place, int vectors, float (&to)[kVec<S>]) {
  const uint4 raw[1] = {__ldg(static_cast<const uint4*>(vector) + min(place.lane, vectors - 1))};
  unpack_row<S, 1>(raw, place, vectors, to, [](float x) { return x; });
}

template <class S>
__device__ __forceinline__ float dot(const float (&x)[kVec<S>], const float (&y)[kVec<S>]) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kVec<S>; ++k) sum = fmaf(x[k], y[k], sum);
  return sum;
}

// An EdgeWindow that also loads the edges' segments and, with dropout, their original ids.
template <class SubWarp, bool kDropout>
struct PairWindow : EdgeWindow<int32_t, SubWarp> {
  using Base = EdgeWindow<int32_t, SubWarp>;
  const int32_t *segments, *ids;
  int32_t segment, id = 0;

  __device__ PairWindow(const PairArgs& args, const Walk<int32_t>& walk, const typename SubWarp::Place& place)
      : Base(args.graph, walk, place),
        segments(held(static_cast<const int32_t*>(args.graph.edge_ids))),
        ids(args.drawn_by) {
    const int64_t last = args.graph.num_edges - 1, at = min(static_cast<int64_t>(walk.edge) + this->slot, last);
    segment = last < 0 ? 0 : __ldg(segments + at);
    if (kDropout && last >= 0) id = __ldg(ids + at);
  }

  __device__ __forceinline__ void settle() {
    Base::settle();
    segment = max(segment, 0);
  }

  __device__ __forceinline__ void advance(Walk<int32_t>& walk) {
    Base::advance(walk);
    if (this->slot >= walk.last_edge - walk.edge) return;
    segment = __ldg(segments + (walk.edge + this->slot));
    if (kDropout) id = __ldg(ids + (walk.edge + this->slot));
  }
};

}  // namespace edgeless::cuda
