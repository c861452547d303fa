// The kernels that merge the segments of hubs, rows so long that several blocks share them (common/partition.cuh), in
// the order of the row's edges: softmax segments for the forward, sums for the passes of the backward.
#pragma once

#include "../../common/merge.cuh"
#include "args.h"

namespace edgeless::cuda {

// Segment `segment` of a hub in the fix-up workspace, for all heads.
template <class A>
__device__ const A* segment_at(const Args<A>& args, const Hub& hub, int64_t segment) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.segment);
  const int64_t at = segment == 0 ? hub.slot : slots + hub.slot + segment - 1;
  return args.carry + at * args.heads * args.carry_size;
}

template <class S>
__device__ void store_element(const OutRows& out, int64_t row, int head, int k, Arithmetic<S> x) {
  const int64_t at = (row * out.heads + head) * out.dim + k;
  if (out.wide) {
    reinterpret_cast<Arithmetic<S>*>(out.base)[at] = x;
  } else {
    reinterpret_cast<S*>(out.base)[at] = to_storage<S>(x);
  }
}

template <class S, class I>
__global__ void __launch_bounds__(kMergeThreads)
    merge_softmax_kernel(const __grid_constant__ Args<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  for_each_hub<I>(args.graph, args.part, [&](const Hub& hub) {
    merge_softmax<A, false>(
        hub.segments, args.heads, args.carry_size, [&](int64_t p) { return segment_at(args, hub, p); },
        [&](int number, A sum, A top, A total) {
          const int head = number / args.carry_size, k = number % args.carry_size;
          if (k < args.out.dim) store_element<S>(args.out, hub.row, head, k, args.given ? sum : sum / total);
          if (k == 0 && args.logsumexp) {
            args.logsumexp[hub.row * args.heads + head] = (top + (args.given ? A(0) : log2(total))) * A(kLn2);
          }
        });
  });
}

// A segment has up to two vectors per head: those of `second` begin at element `split`.
template <class S, class I>
__global__ void __launch_bounds__(kMergeThreads)
    merge_sum_kernel(const __grid_constant__ Args<Arithmetic<S>> args, OutRows first, OutRows second, int split) {
  using A = Arithmetic<S>;
  for_each_hub<I>(args.graph, args.part, [&](const Hub& hub) {
    sum_segments<A>(
        hub.segments, args.heads * args.carry_size, [&](int64_t p) { return segment_at(args, hub, p); },
        [&](int number, A sum) {
          const int head = number / args.carry_size, k = number % args.carry_size;
          const OutRows& out = k < split ? first : second;
          const int at = k < split ? k : k - split;
          if (out && at < out.dim) store_element<S>(out, hub.row, head, at, sum);
        });
  });
}

}  // namespace edgeless::cuda
