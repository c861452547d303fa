// Plans of generated walks: how their rows and edges are divided. No torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/segment_reduce.h"

namespace edgeless::cuda::programs {

static_assert(sizeof(ReducePlan) == 56);  // shared/programs/cuda_walks.py packs a field of this size

constexpr int kBlocksWithTotals = 8;  // blocks per SM; each block writes its partial sums over all edges

// problem: the sizes of the walk. Bytes of vectors and of L2 are not used, since a walk gathers several tensors.
inline ReducePlan make_walk_plan(ReduceProblem problem, bool has_totals) {
  ReducePlan plan;
  plan.slices = (problem.vectors + 31) / 32;
  plan.slice_vectors = (problem.vectors + plan.slices - 1) / plan.slices;
  for (plan.sub_warp_log2 = kLeastReduceLog2; 1 << plan.sub_warp_log2 < plan.slice_vectors;) ++plan.sub_warp_log2;
  if (has_totals) {
    const int64_t sub_warps = kReduceThreads >> plan.sub_warp_log2,
                  units = problem.num_edges + kRowUnits * problem.num_rows;
    const int64_t shares = sub_warps * problem.multiprocessors * kBlocksWithTotals;
    problem.least_share = (units + shares - 1) / shares;
  }
  problem.carry_budget = std::max<int64_t>(4 * problem.num_edges, 1 << 24);
  choose_shares(problem, plan);
  return plan;
}

}  // namespace edgeless::cuda::programs
