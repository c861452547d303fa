// The kernels that divide sorted edges into segments, compute the means over them and map edges to pairs.
//
// Edges are sorted by type and by row. A run is all edges of one type and one row; its first edge and every cut-th edge
// after that begin a segment. Two inclusive scans over the edges (common/scan.h) run between the kernels: the maximum
// index at which a run has begun so far gives every edge the begin of its run, and the count of edges that begin a
// segment gives every edge the index of its segment plus one. In all kernels a thread processes one item, an edge, a
// segment or a type; only in means_kernel a warp processes a segment.
#pragma once

#include <cstdint>

#include "../../common/search.h"
#include "../../common/threads.cuh"
#include "segments.h"

namespace edgeless::cuda::relational {

template <class I>
__global__ void arrange_kernel(ArrangeArgs<I> args) {
  const int64_t p = thread_id();
  if (p >= args.edges) return;
  const I from = args.order[p];
  args.to_rows[p] = args.rows[from];
  args.to_indices[p] = args.indices[from];
  args.to_ids[p] = args.edge_ids ? args.edge_ids[from] : from;
}

// Writes the index of an edge that begins a run, and 0 for all others, as input of the maximum scan.
template <class I>
__global__ void run_begins_kernel(SegmentsArgs<I> args) {
  const int64_t p = thread_id();
  if (p >= args.edges) return;
  const bool begins = p > 0 && (args.rows[p] != args.rows[p - 1] || args.types[p] != args.types[p - 1]);
  args.numbers[p] = begins ? static_cast<I>(p) : I(0);
}

template <class I>
__global__ void segment_begins_kernel(SegmentsArgs<I> args) {
  const int64_t p = thread_id();
  if (p < args.edges) args.numbers[p] = (p - args.numbers[p]) % args.cut == 0;
}

template <class I>
__global__ void segments_kernel(SegmentsArgs<I> args) {
  const int64_t p = thread_id();
  if (p > args.edges) return;
  const I segments = args.edges ? args.numbers[args.edges - 1] : I(0);
  if (p >= segments) args.ptr[p] = static_cast<I>(args.edges);
  if (p == args.edges) *args.count = segments;
  if (p == args.edges) return;
  if (p >= segments) args.segment_rows[p] = static_cast<I>(args.num_rows);
  const I number = args.numbers[p] - 1;
  if (p == 0 || number != args.numbers[p - 1] - 1) {
    args.segment_rows[number] = args.rows[p];
    args.ptr[number] = static_cast<I>(p);
  }
}

template <class I>
__global__ void type_segments_kernel(SegmentsArgs<I> args) {
  const int64_t type = thread_id();
  if (type > args.num_types) return;
  const I first = args.type_begins[type];
  const I all = args.edges ? args.numbers[args.edges - 1] : I(0);
  args.type_ptr[type] = first < args.edges ? args.numbers[first] - 1 : all;
}

// One over the number of edges of the segment's pair, which may be several consecutive segments.
template <class I, class A>
__device__ A mean_of_segment(const MeansArgs<I, A>& args, int64_t segment) {
  const int64_t type = first_behind(1, args.num_types, [&](int64_t t) { return args.type_ptr[t] > segment; }) - 1;
  const int64_t begin = args.type_ptr[type], last = args.type_ptr[type + 1];
  const I row = args.rows[segment];
  int64_t first = segment, end = segment + 1;
  if (first > begin && args.rows[first - 1] == row) {
    first = first_behind(begin, first, [&](int64_t i) { return args.rows[i] >= row; });
  }
  if (end < last && args.rows[end] == row) {
    end = first_behind(end, last, [&](int64_t i) { return args.rows[i] > row; });
  }
  return A(1) / static_cast<A>(args.ptr[end] - args.ptr[first]);
}

template <class I, class A>
__global__ void means_of_segments_kernel(MeansArgs<I, A> args) {
  const int64_t segment = thread_id();
  if (segment < args.type_ptr[args.num_types]) args.means[segment] = mean_of_segment(args, segment);
}

// One warp per segment.
template <class I, class A>
__global__ void means_kernel(MeansArgs<I, A> args) {
  const int64_t segment = thread_id() / kWarp;
  if (segment >= args.type_ptr[args.num_types]) return;
  const A mean = mean_of_segment(args, segment);
  for (int64_t e = args.ptr[segment] + threadIdx.x % kWarp; e < args.ptr[segment + 1]; e += kWarp) {
    args.means[args.edge_ids[e]] = mean;
  }
}

template <class I>
__global__ void pairs_kernel(const I* ptr, int64_t pairs, const I* edge_ids, int64_t edges, I* of_edges) {
  const int64_t e = thread_id();
  if (e >= edges) return;
  of_edges[edge_ids[e]] = static_cast<I>(first_behind(1, pairs, [=](int64_t pair) { return ptr[pair] > e; }) - 1);
}

}  // namespace edgeless::cuda::relational
