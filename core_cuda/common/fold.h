// Folding the rows of a graph's neighbours into one row each (sums, minima, maxima): how the work is laid out. Pure
// functions of sizes, so that results depend on nothing else. No torch.
//
// A row of features is read in vectors of up to 16 bytes, one a lane; a team of 4 to 32 lanes reads one slice of a row.
// Slices follow each other in time (blockIdx.y). A slice is 512 bytes; it is halved, down to 128, where that brings
// what is gathered, nodes times slice, under three quarters of the L2 (45 MiB of the H200's 60): from there a gather
// runs at twice the speed, and reading the indices once more per slice costs about 3 percent. Twice that size still
// gains from what stays in L2; beyond it, and where a node is read fewer than eight times, slices of 512 bytes are
// kept.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../thresholds.h"
#include "partition.h"
#include "storage.h"

namespace edgeless::cuda {

constexpr int kFoldThreads = 128;
constexpr int kLeastFoldLog2 = 2;  // lanes of a team, of rows that are no wider: as many as a batch has edges
constexpr int kMostFoldTeams = kFoldThreads >> kLeastFoldLog2;
constexpr int64_t kMostPiece = 32768;  // edges; with that, a place in a share fits 16 bits
constexpr int64_t kLeastPiece = 256;   // a block takes no longer for them than a launch that merges

// [rows, heads, dim], read in vectors: the innermost dimension is contiguous, every head of every row is made of whole
// vectors and begins on the size of one.
struct FoldRows {
  const char* base = nullptr;
  uint32_t row = 0;  // bytes from row to row
  int64_t head = 0;  // bytes from head to head
};

struct FoldPlan {
  int team_log2 = 3;      // lanes of a team, 4 to 32
  int slice_vectors = 0;  // at most the lanes of a team
  int slices = 0;
  Partition part;
  bool hubs = false;  // rows may be cut: a carry is needed
  int64_t slots = 0;  // places in each half of the carry
};

struct FoldProblem {
  int64_t num_rows = 0, num_edges = 0;
  int64_t num_gathered = 0;  // rows of what is gathered
  int vectors = 0;           // of a row
  int vector_bytes = 16;
  int64_t max_degree = -1;    // edges of a row, -1: unknown
  int64_t carry_bytes = 0;    // of a piece of a hub
  int64_t carry_budget = 0;   // bytes that all pieces may take
  bool narrow_teams = false;  // of four lanes, where rows are no wider
  int multiprocessors = 1;
  int blocks_at_once = 0;  // that a multiprocessor holds, 0: unknown
  int64_t l2_bytes = 0;
};

// The most vectors a slice should have.
inline int most_slice_vectors(const FoldProblem& p) {
  if (p.num_edges < kReadsThatPay * p.num_gathered) return 32;
  const int64_t fits = p.l2_bytes * kFoldL2Percent / 100, vector = p.num_gathered * p.vector_bytes;
  const int least = std::max(8, 128 / p.vector_bytes);
  for (int most = 32; most >= least; most /= 2) {
    if (vector * std::min(most, p.vectors) <= fits) return most;
  }
  return vector * least <= 2 * fits ? least : 32;
}

// Of the widths up to that, the one that leaves the fewest lanes idle, with a little for what a slice costs besides.
inline void choose_slices(const FoldProblem& p, FoldPlan& plan) {
  const int most = most_slice_vectors(p);
  double best = 0;
  const int least_log2 = p.narrow_teams && p.vectors <= 1 << kLeastFoldLog2 ? kLeastFoldLog2 : 3;
  for (int log2 = 5; log2 >= least_log2; --log2) {
    const int width = 1 << log2, slices = (p.vectors + width - 1) / width;
    const double busy = double(p.vectors) / (slices * width) * width / (width + 0.5);
    if (width > most || busy <= best * 1.05) continue;
    best = busy;
    plan.team_log2 = log2, plan.slices = slices, plan.slice_vectors = (p.vectors + slices - 1) / slices;
  }
}

// The shares of teams that the plan names already.
inline void choose_shares(const FoldProblem& p, FoldPlan& plan) {
  const int64_t teams = kFoldThreads >> plan.team_log2;
  const int64_t units = p.num_edges + kRowUnits * p.num_rows;
  // Many small shares balance best, but one below 128 units costs more to begin; few where the graph is small.
  const int64_t blocks_of_one = std::max<int64_t>(1, units * plan.slices / (teams * p.multiprocessors));
  int64_t share = std::clamp<int64_t>(std::max(blocks_of_one / 64, std::min<int64_t>(blocks_of_one / 8, 128)),
                                      kLeastShare, kMostShare);
  const int64_t at_once = int64_t(p.multiprocessors) * p.blocks_at_once * teams,
                of_one_turn = at_once > 0 ? (units + at_once - 1) / at_once : 0;
  const int64_t gathered = p.num_gathered * p.vectors * p.vector_bytes;
  if (plan.slices == 1 && one_turn_pays(of_one_turn, p.num_edges, p.num_rows, gathered, p.l2_bytes)) {
    share = of_one_turn;
  }
  Partition& part = plan.part;
  part.range_units = share * teams;
  part.num_ranges = std::max<int64_t>(1, (units + part.range_units - 1) / part.range_units);
  const int64_t budget = std::max<int64_t>(p.carry_budget, 1);
  part.piece =
      std::max({part.range_units, kLeastPiece, std::min(kMostPiece, 2 * p.num_edges * p.carry_bytes / budget)});
  plan.hubs = may_cut(p.max_degree, p.num_edges, part);
  plan.slots = number_of_slots(p.num_edges, part.piece);
}

inline FoldPlan make_fold_plan(const FoldProblem& p) {
  FoldPlan plan;
  choose_slices(p, plan);
  choose_shares(p, plan);
  return plan;
}

}  // namespace edgeless::cuda
