// Plans of generated walks: how their rows and edges are divided. No torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/fold.h"

namespace edgeless::cuda::programs {

static_assert(sizeof(FoldPlan) == 56);  // shared/programs/run/cuda_walks.py leaves room for it

constexpr int kBlocksWithTotals = 8;  // an SM; each block leaves its part of the sums over all edges

// problem: its sizes; the bytes of vectors and the L2 do not matter, since a walk gathers several tensors.
inline FoldPlan make_walk_plan(FoldProblem problem, bool has_totals) {
  FoldPlan plan;
  plan.slices = (problem.vectors + 31) / 32;
  plan.slice_vectors = (problem.vectors + plan.slices - 1) / plan.slices;
  for (plan.team_log2 = kLeastFoldLog2; 1 << plan.team_log2 < plan.slice_vectors;) ++plan.team_log2;
  if (has_totals) {
    const int64_t teams = kFoldThreads >> plan.team_log2, units = problem.num_edges + kRowUnits * problem.num_rows;
    const int64_t shares = teams * problem.multiprocessors * kBlocksWithTotals;
    problem.least_share = (units + shares - 1) / shares;
  }
  problem.carry_budget = std::max<int64_t>(4 * problem.num_edges, 1 << 24);
  choose_shares(problem, plan);
  return plan;
}

}  // namespace edgeless::cuda::programs
