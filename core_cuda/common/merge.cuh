// Hubs, the rows that a partition cuts (partition.h), found on the device, and how their pieces are merged: in an order
// that depends on the graph alone.
#pragma once

#include "partition.cuh"
#include "vec.cuh"

namespace edgeless::cuda {

// The last range cut inside the row, in pieces from its start.
__device__ inline int64_t last_cut(int64_t row_begin, int64_t degree, const Partition& part) {
  const int64_t last = (row_begin + kRowUnits + degree - 1) / part.range_units * part.range_units;
  return (last - row_begin - kRowUnits) / part.piece;
}

// A row that was cut, the first time at the place with this slot; pieces: its cuts and one. 0: there is none.
struct Hub {
  int64_t slot, row, pieces;
};

// Only the row that holds the slot's first edge can have its first cut there. Whole warp.
template <class I>
__device__ inline Hub find_hub(const CompressedGraph& graph, const Partition& part, int64_t slot) {
  const I* indptr = static_cast<const I*>(graph.indptr);
  const int64_t row = row_of_edge(indptr, graph.num_rows, slot * part.piece, threadIdx.x % 32);
  const int64_t first = indptr[row], degree = indptr[row + 1] - first;
  if (!is_hub(degree, part) || piece_slot(first + part.piece, part.piece) != slot) return {slot, 0, 0};
  const int64_t cuts = last_cut(first + kRowUnits * row, degree, part);
  return {slot, row, cuts > 0 ? cuts + 1 : 0};
}

// merge(hub) for every hub whose first cut has one of the block's slots. Most have none: a warp looks at each. Whole
// block.
template <class I, class F>
__device__ inline void for_each_hub(const CompressedGraph& graph, const Partition& part, F&& merge) {
  __shared__ Hub hubs[kSlotsOfBlock];
  const int warp = threadIdx.x / 32;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kSlotsOfBlock + warp;
  Hub hub{slot, 0, 0};
  if (slot < number_of_slots(graph.num_edges, part.piece)) hub = find_hub<I>(graph, part, slot);
  if (threadIdx.x % 32 == 0) hubs[warp] = hub;
  __syncthreads();
  for (int k = 0; k < kSlotsOfBlock; ++k) {
    if (hubs[k].pieces > 0) merge(hubs[k]);
  }
}

// The kernels that merge pieces have a block for each few slots and kMergeThreads numbers of a piece.
inline dim3 merge_grid(int64_t slots, int64_t numbers) {
  return {merge_blocks(slots), static_cast<unsigned>((numbers + kMergeThreads - 1) / kMergeThreads)};
}

// How the threads of such a block lie over its numbers and the pieces of a hub. Where the numbers are fewer than the
// threads, several threads share the pieces of one: one after the other, the pieces would take a memory latency each.
struct MergeLanes {
  int number;         // of a piece, that this thread merges
  bool inside;        // whether there is one
  int share, shares;  // of the pieces, which are cut in their order; behind the last share there is none
  int width = 1;      // threads over the numbers
  int64_t first, last;

  __device__ MergeLanes(int numbers, int64_t pieces) {
    const int from = static_cast<int>(blockIdx.y) * kMergeThreads, count = min(numbers - from, kMergeThreads);
    while (width < count) width *= 2;
    number = from + threadIdx.x % width, inside = threadIdx.x % width < count;
    share = threadIdx.x / width;
    shares = static_cast<int>(min(pieces, static_cast<int64_t>(kMergeThreads / width)));
    first = pieces * share / shares;
    last = inside && share < shares ? pieces * (share + 1) / shares : first;
  }

  // What combine() makes of what all shares have, in their order, in the threads of the first. Whole block.
  template <class A, class Combine>
  __device__ A over_shares(A x, Combine&& combine) const {
    __shared__ A parts[kMergeThreads];
    __syncthreads();
    parts[threadIdx.x] = x;
    __syncthreads();
    x = parts[threadIdx.x % width];
    for (int s = 1; s < shares; ++s) x = combine(x, parts[threadIdx.x % width + s * width]);
    return x;
  }
  template <class A>
  __device__ A sum_of_shares(A x) const {
    return over_shares(x, [](A a, A b) { return a + b; });
  }
};

// store(k, sum over the pieces of piece(p)[k]) for this block's part of the numbers. Whole block.
template <class A, class Piece, class Store>
__device__ inline void sum_pieces(int64_t pieces, int numbers, Piece&& piece, Store&& store) {
  const MergeLanes lanes(numbers, pieces);
  A sum = 0;
#pragma unroll 4
  for (int64_t p = lanes.first; p < lanes.last; ++p) sum += piece(p)[lanes.number];
  sum = lanes.sum_of_shares(sum);
  if (lanes.inside && lanes.share == 0) store(lanes.number, sum);
}

// The same of pieces of a softmax, which hold sums of exponentials times values, for `heads` heads each `size` numbers:
// the last two are the greatest logit and the sum of exponentials. store(k, sum, greatest logit, sum of exponentials)
// of all pieces. kNatural: logits are not in base 2.
template <class A, bool kNatural, class Piece, class Store>
__device__ inline void merge_softmax(int64_t pieces, int heads, int size, Piece&& piece, Store&& store) {
  const MergeLanes lanes(heads * size, pieces);
  const int number = lanes.inside ? lanes.number : 0, logit = number / size * size + size - 2;
  A top = -INFINITY, sum = 0, total = 0;
#pragma unroll 4
  for (int64_t p = lanes.first; p < lanes.last; ++p) top = max(top, piece(p)[logit]);
  top = lanes.over_shares(top, [](A a, A b) { return max(a, b); });
#pragma unroll 4
  for (int64_t p = lanes.first; p < lanes.last; ++p) {
    const A factor = power_of_two((piece(p)[logit] - top) * (kNatural ? A(kLog2e) : A(1)));
    sum = fma(piece(p)[number], factor, sum), total = fma(piece(p)[logit + 1], factor, total);
  }
  sum = lanes.sum_of_shares(sum), total = lanes.sum_of_shares(total);
  if (lanes.inside && lanes.share == 0) store(number, sum, top, total);
}

}  // namespace edgeless::cuda
