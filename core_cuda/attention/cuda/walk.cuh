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

constexpr int kMaxTeams = kBlockThreads / 4;

struct Place {
  int width, lane, slot;  // lanes of the team, lane in it, edge of a batch that this lane owns
  int team, chain, chains;
  int heads;              // of the slice; also the distance between neighbouring chains' teams
  int head;
  unsigned mask;          // the team's lanes in its warp
  bool working;

  __device__ Place(const Layout& layout, int all_heads) {
    const int thread = threadIdx.x;
    width = 1 << layout.team_log2;
    lane = thread & (width - 1);
    slot = thread & (kBatch - 1);
    team = thread >> layout.team_log2;
    heads = layout.heads_per_slice;
    chain = team / heads;
    chains = (kBlockThreads >> layout.team_log2) / heads;
    head = static_cast<int>(blockIdx.y) * heads + team % heads;
    mask = width == 32 ? kFullWarp : ((1u << width) - 1) << (thread & 31 & ~(width - 1));
    working = chain < chains && head < all_heads;
    if (!working) head = 0;
  }
};

enum PieceStatus : uint8_t { kNoPiece, kRowEnds, kRowGoesOn };

template <class I>
struct BlockShares {  // shared memory
  Cut<I> cuts[kMaxTeams + 1];
  uint8_t status[kMaxTeams];
};

template <class I>
__device__ inline void divide_block(const Graph& graph, const Partition& part, const Place& place, BlockShares<I>& s) {
  const I* indptr = static_cast<const I*>(graph.indptr);
  const int warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
  if (warp < 2) {
    const Cut<I> cut = range_cut(indptr, graph.num_rows, graph.num_edges, part, blockIdx.x + warp, warp_lane);
    if (warp_lane == 0) s.cuts[warp ? place.chains : 0] = cut;
  }
  if (threadIdx.x < kMaxTeams) s.status[threadIdx.x] = kNoPiece;
  __syncthreads();
  const Cut<I> begin = s.cuts[0], end = s.cuts[place.chains];
  const int share = threadIdx.x;
  if (share > 0 && share < place.chains) s.cuts[share] = share_cut(indptr, begin, end, share, place.chains);
  __syncthreads();
}

// A team's way through its share, row by row.
template <class I>
struct Walk {
  const I* indptr;
  I row, edge, row_end, next_end;
  I last_row, last_edge;  // whole rows before last_row, and that row's edges before last_edge
  bool active;
  bool lead;  // the row began in an earlier share

  __device__ Walk(const Graph& graph, const Place& place, const BlockShares<I>& s)
      : indptr(static_cast<const I*>(graph.indptr)) {
    if (!place.working) {
      row = edge = row_end = next_end = last_row = last_edge = 0;
      active = lead = false;
      return;
    }
    const Cut<I> begin = s.cuts[place.chain], end = s.cuts[place.chain + 1];
    row = begin.row, edge = begin.edge, last_row = end.row, last_edge = end.edge;
    active = row < last_row || edge < last_edge;
    lead = active && edge > indptr[row];
    row_end = row < last_row ? indptr[row + 1] : last_edge;
    next_end = row + 1 < last_row ? indptr[row + 2] : last_edge;
  }

  __device__ bool row_complete() const { return row < last_row; }

  __device__ void next_row() {
    ++row;
    lead = false;
    row_end = next_end;
    next_end = row + 1 < last_row ? indptr[row + 2] : last_edge;
    active = row < last_row || (row == last_row && edge < last_edge);
  }
};

// Where a piece of a hub is kept.
template <class A>
__device__ inline A* carry_at(const Args<A>& args, bool lead, int64_t row_begin, int64_t block_begin, int head) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.piece);
  const int64_t slot = piece_slot(lead ? block_begin : row_begin + args.part.piece, args.part.piece);
  return args.carry + (((lead ? slots : 0) + slot) * args.heads + head) * args.carry_size;
}

}  // namespace edgeless::cuda
