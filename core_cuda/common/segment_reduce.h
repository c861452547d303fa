// Plans of segment reductions: sums, minima or maxima over the neighbours' rows of each row. A plan is a pure function
// of the sizes in ReduceProblem, so the order of summation depends on nothing else. No torch.
//
// A feature row is read in vectors of up to 16 bytes, one per lane; a sub-warp of 4 to 32 lanes reads one feature tile
// (`slice`) of the row. Feature tiles are processed one after the other (blockIdx.y). A tile is 512 bytes wide. It is
// halved, down to 128 bytes, where that brings the gathered working set, nodes times tile, under three quarters of the
// L2 (45 MiB of the H200's 60): gathers from L2 run at twice the speed, and reading the indices once more per tile
// costs about 3 percent. A working set of up to twice that size still gains from narrow tiles, since part of it stays
// in L2. For larger working sets, and where a node is read fewer than eight times, tiles stay 512 bytes wide.
#pragma once

#include <algorithm>
#include <cstdint>

#include "partition.h"
#include "storage.h"
#include "thresholds.h"

namespace edgeless::cuda {

constexpr int kReduceThreads = 128;
// log2 of the lanes of the narrowest sub-warps, which are for rows of at most four vectors and have batches of four
// edges.
constexpr int kLeastReduceLog2 = 2;
constexpr int kMostReduceSubWarps = kReduceThreads >> kLeastReduceLog2;
constexpr int64_t kMostSegment = 32768;  // edges; an offset in a segment fits 16 bits
constexpr int64_t kLeastSegment = 256;   // edges; a block reduces so many in the time of a merge launch

// Rows [rows, heads, dim] that are read in vectors: the innermost dimension is contiguous, and every head of every row
// consists of whole vectors and is aligned to their size.
struct ReduceRows {
  const char* base = nullptr;
  uint32_t row = 0;  // bytes from row to row
  int64_t head = 0;  // bytes from head to head
};

struct ReducePlan {
  int sub_warp_log2 = 3;  // log2 of the lanes per sub-warp, 4 to 32
  int slice_vectors = 0;  // vectors per feature tile, at most the lanes of a sub-warp
  int slices = 0;
  Partition part;
  bool hubs = false;  // rows may be split: the kernel needs the fix-up workspace (`carry`)
  int64_t slots = 0;  // segments in each half of the workspace
};

struct ReduceProblem {
  int64_t num_rows = 0, num_edges = 0;
  int64_t num_gathered = 0;  // rows of the gathered tensor
  int vectors = 0;           // vectors per row
  int vector_bytes = 16;
  int64_t max_degree = -1;        // edges of the longest row, -1: unknown
  int64_t carry_bytes = 0;        // bytes per segment of a hub
  int64_t carry_budget = 0;       // bytes for the segments of all hubs
  bool narrow_sub_warps = false;  // allows sub-warps of four lanes, for rows of at most four vectors
  int multiprocessors = 1;
  int blocks_at_once = 0;   // occupancy in blocks per SM, 0: unknown
  int64_t least_share = 0;  // least units of a quota
  int64_t l2_bytes = 0;
};

// Upper bound of the vectors per feature tile, by the L2 rule in the head of the file.
inline int most_slice_vectors(const ReduceProblem& p) {
  if (p.num_edges < kReadsThatPay * p.num_gathered) return 32;
  const int64_t fits = p.l2_bytes * kReduceL2Percent / 100, vector = p.num_gathered * p.vector_bytes;
  const int least = std::max(8, 128 / p.vector_bytes);
  for (int most = 32; most >= least; most /= 2) {
    if (vector * std::min(most, p.vectors) <= fits) return most;
  }
  return vector * least <= 2 * fits ? least : 32;
}

// Chooses, up to that bound, the sub-warp width that leaves the fewest lanes idle; half a lane represents the fixed
// cost of a feature tile.
inline void choose_slices(const ReduceProblem& p, ReducePlan& plan) {
  const int most = most_slice_vectors(p);
  double best = 0;
  const int least_log2 = p.narrow_sub_warps && p.vectors <= 1 << kLeastReduceLog2 ? kLeastReduceLog2 : 3;
  for (int log2 = 5; log2 >= least_log2; --log2) {
    const int width = 1 << log2, slices = (p.vectors + width - 1) / width;
    const double busy = double(p.vectors) / (slices * width) * width / (width + 0.5);
    if (width > most || busy <= best * 1.05) continue;
    best = busy;
    plan.sub_warp_log2 = log2, plan.slices = slices, plan.slice_vectors = (p.vectors + slices - 1) / slices;
  }
}

// Sets the partition; the sub-warp width and the feature tiles are already chosen.
inline void choose_shares(const ReduceProblem& p, ReducePlan& plan) {
  const int64_t sub_warps = kReduceThreads >> plan.sub_warp_log2;
  const int64_t units = p.num_edges + kRowUnits * p.num_rows;
  // Many small quotas balance best, but a quota below 128 units is dominated by its start-up cost. Small graphs get
  // smaller quotas anyway, to occupy every SM.
  const int64_t blocks_of_one = std::max<int64_t>(1, units * plan.slices / (sub_warps * p.multiprocessors));
  int64_t share = std::clamp<int64_t>(std::max(blocks_of_one / 64, std::min<int64_t>(blocks_of_one / 8, 128)),
                                      kLeastShare, kMostShare);
  const int64_t at_once = int64_t(p.multiprocessors) * p.blocks_at_once * sub_warps,
                of_one_wave = at_once > 0 ? (units + at_once - 1) / at_once : 0;
  const int64_t gathered = p.num_gathered * p.vectors * p.vector_bytes;
  if (plan.slices == 1 && one_wave_pays(of_one_wave, p.num_edges, p.num_rows, gathered, p.l2_bytes)) {
    share = of_one_wave;
  }
  share = std::max(share, p.least_share);
  Partition& part = plan.part;
  part.range_units = share * sub_warps;
  part.num_ranges = std::max<int64_t>(1, (units + part.range_units - 1) / part.range_units);
  const int64_t budget = std::max<int64_t>(p.carry_budget, 1);
  part.segment =
      std::max({part.range_units, kLeastSegment, std::min(kMostSegment, 2 * p.num_edges * p.carry_bytes / budget)});
  plan.hubs = may_cut(p.max_degree, p.num_edges, part);
  plan.slots = number_of_slots(p.num_edges, part.segment);
}

inline ReducePlan make_reduce_plan(const ReduceProblem& p) {
  ReducePlan plan;
  choose_slices(p, plan);
  choose_shares(p, plan);
  return plan;
}

}  // namespace edgeless::cuda
