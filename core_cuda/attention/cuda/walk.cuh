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
// with kOneHeadAWarp, neighbouring chains of one head. kRowWidth: lanes that hold a row, all of the team's or one.
template <int kWidth, bool kOneHeadAWarp = false, int kRowWidth = kWidth>
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
  __device__ __forceinline__ int row_width() const { return kRowWidth ? kRowWidth : runtime_width; }
  __device__ __forceinline__ int row_lane() const { return kRowWidth == kWidth ? lane : lane % kRowWidth; }
  // The team's lanes in its warp.
  __device__ unsigned mask() const {
    return width() == 32 ? kFullWarp : ((1u << width()) - 1) << (threadIdx.x & 31 & ~(width() - 1));
  }
};

// How many lanes a team has (0: known when the kernel runs) and how many edges a batch, whose rows are all asked for
// before the first is used. A batch of more edges than lanes has several turns. kSpread: each lane has an edge of its
// own and reads its row, a whole one; else all lanes share all rows of a turn.
template <int kLanes, int kBatchEdges, bool kSpreadEdges = false>
struct TeamShape {
  static constexpr int kWidth = kLanes, kBatch = kBatchEdges;
  static constexpr int kTurns = kWidth && kWidth < kBatch ? kBatch / kWidth : 1;
  static constexpr int kEdges = kBatch / kTurns;
  static constexpr bool kNarrow = is_narrow(kWidth);
  static constexpr bool kSpread = kSpreadEdges;
  static constexpr int kRowWidth = kSpread ? 1 : kWidth;  // lanes that hold a row
  static constexpr int kRows = kSpread ? 1 : kEdges;      // of a turn, that a lane reads
  static_assert(!kSpread || kWidth == kEdges);

  // What the owner of the edge of row u has, in the lanes that read that row.
  template <class T>
  static __device__ __forceinline__ T from_owner(T x, int u) {
    return kSpread ? x : cuda::from_owner<kEdges>(x, u);
  }
  // A vector that each lane has summed over its own edges, summed over those of all lanes.
  template <class T, int kPer>
  static __device__ __forceinline__ void sum_lanes(T (&x)[kPer], unsigned mask) {
    if constexpr (kSpread) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) x[k] = batch_sum<kEdges>(x[k], mask);
    }
  }
};

template <class I>
using BlockShares = RangeShares<I, kMaxTeams>;

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
    row_end = row < last_row ? next_end : last_edge;  // chosen here, since choosing waits for what was loaded
    if (row + 1 < last_row) next_end = indptr[row + 2];
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

// Whether a team holds the first edges of a row that the next chain goes on with; lead: not of all of its edges.
struct Leader {
  bool there = false, lead = false;
};

struct Never {
  __device__ bool operator()() const { return false; }
};

// Where a piece of a hub is kept.
template <class A, class I>
__device__ inline A* carry_at(const Args<A>& args, const BlockShares<I>& s, bool lead, int head) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.piece);
  const int64_t slot = lead ? slots + s.lead_slot : s.last_slot;
  return args.carry + (slot * args.heads + head) * args.carry_size;
}

// Hands on what the edges of the row at hand came to, all that are in this share.
template <class I, class P, class Close, class Clear, class Leave, class Emit>
__device__ __forceinline__ void put_row(const Walk<I>& walk, const P& place, BlockShares<I>& shares, Leader& leader,
                                        Close&& close, Clear&& clear, Leave&& leave, Emit&& emit) {
  close();
  if (walk.joins) {
    leave();
    if (place.lane == 0) {
      shares.status[place.team] = walk.row_complete() ? PieceStatus::row_ends : PieceStatus::row_goes_on;
    }
  } else if (walk.row_complete()) {
    emit(walk.row, walk.lead, true);
  } else {
    leader.there = true, leader.lead = walk.lead;
    return;
  }
  clear();
}

// Merges the pieces of the rows that chains share, when all were left.
template <class I, class P, class Add, class Emit>
__device__ __forceinline__ void merge_pieces(const Walk<I>& walk, const P& place, const BlockShares<I>& shares,
                                             const Leader& leader, Add&& add, Emit&& emit) {
  if (!leader.there) return;
  bool complete = false;
  for (int chain = place.chain + 1; chain < place.chains && !complete; ++chain) {
    const int ahead = (chain - place.chain) * place.chain_distance, team = place.team + ahead;
    if (shares.status[team] == PieceStatus::none) continue;
    complete = shares.status[team] == PieceStatus::row_ends;
    add(team, threadIdx.x + ahead * place.width());
  }
  emit(walk.last_row, leader.lead, complete);
}

// Walks a team's share and merges the pieces of the rows that the block's chains share. With kSettle it waits for the
// first batch's indices ahead of the loop: a warp has six barriers for all its loads, so with an index on its way at
// the head of the loop every batch would wait there for what its row has just asked for (docs/decisions/0035). What
// happens at a row:
//   begin()                    asks for what the row at hand needs
//   take()                     takes the next batch of its edges, none for a team that is done; whole warp
//   close()                    all edges of the row that are in this share were taken
//   clear()                    forgets them
//   leave()                    what they came to goes to shared memory, for the team that holds the row's first edges
//   add(team, thread)          adds what that team left; thread: the one of this lane's numbers
//   emit(row, lead, complete)  writes the row, or its piece where other blocks have others
//   failed()                   when all shares were walked: whether they have to be walked again, by walk_again()
// False where they have to be: then nothing was merged.
template <bool kSettle = true, class I, class P, class Window, class Begin, class Take, class Close, class Clear,
          class Leave, class Add, class Emit, class Failed = Never>
__device__ __forceinline__ bool walk_rows(Walk<I>& walk, const P& place, BlockShares<I>& shares, Window& window,
                                          Begin&& begin, Take&& take, Close&& close, Clear&& clear, Leave&& leave,
                                          Add&& add, Emit&& emit, Failed&& failed = {}) {
  Leader leader;
  auto end_row = [&] { put_row(walk, place, shares, leader, close, clear, leave, emit); };

  if (walk.edge < walk.row_end) begin();
  if constexpr (kSettle) window.settle();
  while (true) {
    if (walk.at_row_end() && walk.finish_rows(end_row)) begin();
    if (!__any_sync(kFullWarp, walk.edge < walk.row_end)) break;
    take();
  }

  __syncthreads();
  if (failed()) return false;
  merge_pieces(walk, place, shares, leader, add, emit);
  return true;
}

// Walks the shares of a block again. make() makes what the edges of the row at hand come to, and what close() and
// emit() read of the row itself.
template <class I, class P, class Make, class Close, class Clear, class Leave, class Add, class Emit>
__device__ __forceinline__ void walk_again(Walk<I>& walk, const P& place, BlockShares<I>& shares, Make&& make,
                                           Close&& close, Clear&& clear, Leave&& leave, Add&& add, Emit&& emit) {
  Leader leader;
  for (; walk.more(); walk.next_row()) {
    make();
    walk.edge = walk.row_end;
    put_row(walk, place, shares, leader, close, clear, leave, emit);
  }
  __syncthreads();
  merge_pieces(walk, place, shares, leader, add, emit);
}

}  // namespace edgeless::cuda
