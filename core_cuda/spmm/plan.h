// How sums are laid out: the plan of a fold (common/fold.h) for the kernel that a sum takes. Pure functions of sizes;
// no CUDA and no torch.
#pragma once

#include "../common/fold.h"

namespace edgeless::cuda::spmm {

// in_order: the weights are there by position. Walks of wide teams are few windows long, too short to ask ahead.
inline Weighing weighing_of(bool weighed, bool by_head, bool in_order, int team_log2) {
  if (by_head) return Weighing::by_head;
  if (!weighed) return Weighing::none;
  return in_order || team_log2 > 4 ? Weighing::by_edge : Weighing::by_edge_ahead;
}

// number_bytes: of a number of x. Sums by heads' own weights are not laid out for one turn of blocks: nobody has timed
// it.
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
