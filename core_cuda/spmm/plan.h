// The plan of a segment reduction (common/fold.h) for the kernel that an SpMM call uses. Pure functions of sizes; no
// CUDA and no torch.
#pragma once

#include "../common/fold.h"

namespace edgeless::cuda::spmm {

// in_order: an array of weights in CSR order exists. The tile loop of a 32-lane sub-warp has too few windows to profit
// from prefetching weights.
inline Weighing weighing_of(bool weighed, bool by_head, bool in_order, int team_log2) {
  if (by_head) return Weighing::by_head;
  if (!weighed) return Weighing::none;
  return in_order || team_log2 > 4 ? Weighing::by_edge : Weighing::by_edge_ahead;
}

// number_bytes: bytes of one element of x. Plans with per-head weights do not aim for a single wave of blocks: that has
// not been measured.
inline FoldPlan make_sum_plan(FoldProblem problem, bool weighed, bool by_head, int number_bytes, bool wide_index) {
  FoldPlan plan;
  choose_slices(problem, plan);
  const Weighing weighing = weighing_of(weighed, by_head, false, plan.team_log2);
  if (!by_head) {
    problem.blocks_at_once = sum_blocks(weighing, problem.vector_bytes, number_bytes, wide_index,
                                        sum_batch(plan.team_log2, problem.num_edges, problem.num_rows));
  }
  choose_shares(problem, plan);
  return plan;
}

}  // namespace edgeless::cuda::spmm
