// Who does what in a block, the same in every pass.
//
// A block owns a range of the graph (partition.cuh) for the heads of one slice. Its teams stand on chains: a chain has
// one team for each head of the slice and walks one equal share of the range. The pieces of a row that several chains
// share are merged in the order of the chains: every team but the first leaves its piece in shared memory, the team
// that holds the row's first edges keeps its own in registers, adds the others and writes the row.
#pragma once

#include "../../common/partition.cuh"
#include "../../common/warp.cuh"
#include "args.h"

namespace edgeless::cuda {

constexpr int kMaxTeams = kBlockThreads;

// Keeps the compiler from computing a value again and again in the loop instead of holding it.
template <class T>
__device__ __forceinline__ T held(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

// kWidth: lanes of a team where it is known when compiling, else 0. Neighbouring teams take the heads of one edge, or,
// with kOneHeadAWarp, neighbouring chains of one head.
template <int kWidth, bool kOneHeadAWarp = false>
struct Place {
  int runtime_width;
  int lane;  // in the team
  int team, chain, chains;
  int chain_distance;  // in teams
  int head;
  bool working;

  __device__ Place(const Layout& layout, int all_heads) {
    const int thread = threadIdx.x;
    runtime_width = 1 << layout.team_log2;
    lane = held(thread & (width() - 1));
    team = thread / width();
    const int heads = layout.heads_per_slice;
    chains = kBlockThreads / width() / heads;
    chain = kOneHeadAWarp ? team % chains : team / heads;
    chain_distance = kOneHeadAWarp ? 1 : heads;
    head = static_cast<int>(blockIdx.y) * heads + (kOneHeadAWarp ? team / chains : team % heads);
    working = chain < chains && head < all_heads;
    if (!working) head = 0;
  }

  __device__ __forceinline__ int width() const { return kWidth ? kWidth : runtime_width; }
  // The team's lanes in its warp.
  __device__ unsigned mask() const {
    return width() == 32 ? kFullWarp : ((1u << width()) - 1) << (threadIdx.x & 31 & ~(width() - 1));
  }
};

enum PieceStatus : uint8_t { kNoPiece, kRowEnds, kRowGoesOn };

template <class I>
struct BlockShares {  // shared memory
  Cut<I> cuts[kMaxTeams + 1];
  int64_t lead_slot, last_slot;  // pieces of hubs: the one that an earlier block began, the one that begins here
  uint8_t status[kMaxTeams];
};

template <class I, class P>
__device__ inline void divide_block(const CompressedGraph& graph, const Partition& part, const P& place,
                                    BlockShares<I>& s) {
  const I* indptr = static_cast<const I*>(graph.indptr);
  const int warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
  if (warp < 2) {
    const Cut<I> cut = range_cut(indptr, graph.num_rows, part, blockIdx.x + warp, warp_lane);
    if (warp_lane == 0) {
      s.cuts[warp ? place.chains : 0] = cut;
      if (warp == 0) s.lead_slot = piece_slot(cut.edge, part.piece);
      if (warp == 1) s.last_slot = cut.row < graph.num_rows ? piece_slot(indptr[cut.row] + part.piece, part.piece) : 0;
    }
  }
  if (threadIdx.x < kMaxTeams) s.status[threadIdx.x] = kNoPiece;
  __syncthreads();
  const Cut<I> begin = s.cuts[0], end = s.cuts[place.chains];
  const int share = threadIdx.x;
  if (share > 0 && share < place.chains) s.cuts[share] = share_cut(indptr, begin, end, share, place.chains);
  __syncthreads();
}

// A team's way through its share, row by row. It stands between batches at an edge before row_end, and is done when
// the two are equal.
template <class I>
struct Walk {
  const I* indptr;
  I row, edge, row_end, next_end;
  I last_row, last_edge;  // whole rows before last_row, and that row's edges before last_edge
  bool lead;              // the row began in an earlier share
  bool joins;             // in one of this block
  bool pending;           // there is a row to end, perhaps with edges before that

  template <class P>
  __device__ Walk(const CompressedGraph& graph, const P& place, const BlockShares<I>& s)
      : indptr(static_cast<const I*>(graph.indptr)) {
    if (!place.working) {
      row = edge = row_end = next_end = last_row = last_edge = 0;
      lead = joins = pending = false;
      return;
    }
    const Cut<I> begin = s.cuts[place.chain], end = s.cuts[place.chain + 1];
    row = begin.row, edge = begin.edge, last_row = end.row, last_edge = end.edge;
    pending = more();
    lead = pending && edge > indptr[row];
    joins = lead && edge > s.cuts[0].edge;
    row_end = !pending ? edge : row < last_row ? indptr[row + 1] : last_edge;
    next_end = row + 1 < last_row ? indptr[row + 2] : last_edge;
  }

  // Whether there is another row, from the place between two rows.
  __device__ bool more() const { return row < last_row || (row == last_row && edge < last_edge); }
  __device__ bool row_complete() const { return row < last_row; }
  __device__ int batch(int most) const {
    return static_cast<int>(min(static_cast<I>(most), static_cast<I>(row_end - edge)));
  }

  __device__ void next_row() {
    ++row;
    lead = joins = false;
    row_end = next_end;
    next_end = row + 1 < last_row ? indptr[row + 2] : last_edge;
  }

  __device__ bool at_row_end() const { return edge == row_end && pending; }

  // At the end of a row: ends it and those without edges after it; true if there is another one to begin.
  template <class F>
  __device__ bool finish_rows(F&& end_row) {
    do {
      end_row();
      next_row();
    } while (more() && edge == row_end);
    pending = more();
    if (!pending) row_end = edge;
    return pending;
  }
};

// Where a piece of a hub is kept.
template <class A, class I>
__device__ inline A* carry_at(const Args<A>& args, const BlockShares<I>& s, bool lead, int head) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.piece);
  const int64_t slot = lead ? slots + s.lead_slot : s.last_slot;
  return args.carry + (slot * args.heads + head) * args.carry_size;
}

}  // namespace edgeless::cuda
