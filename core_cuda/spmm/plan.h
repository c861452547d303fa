// The plan of a segment reduction (common/segment_reduce.h) for the kernel that an SpMM call uses. Pure functions of
// sizes; no CUDA and no torch.
#pragma once

#include "../common/segment_reduce.h"

namespace edgeless::cuda::spmm {

// in_order: an array of weights in CSR order exists. The tile loop of a 32-lane sub-warp has too few windows to profit
// from prefetching weights.
inline Weighing weighing_of(bool weighed, bool by_head, bool in_order, int sub_warp_log2) {
  if (by_head) return Weighing::by_head;
  if (!weighed) return Weighing::none;
  return in_order || sub_warp_log2 > 4 ? Weighing::by_edge : Weighing::by_edge_ahead;
}

// number_bytes: bytes of one element of x. Plans with per-head weights do not aim for a single wave of blocks: that has
// not been measured.
inline ReducePlan make_sum_plan(ReduceProblem problem, bool weighed, bool by_head, int number_bytes, bool wide_index) {
  ReducePlan plan;
  choose_slices(problem, plan);
  const Weighing weighing = weighing_of(weighed, by_head, false, plan.sub_warp_log2);
  if (!by_head) {
    problem.blocks_at_once = sum_blocks(weighing, problem.vector_bytes, number_bytes, wide_index,
                                        sum_batch(plan.sub_warp_log2, problem.num_edges, problem.num_rows));
  }
  choose_shares(problem, plan);
  return plan;
}

// Returns whether the products of weights and source scales are written in CSR order before the sum. That is profitable
// if the kernel reads them once per feature tile and the array is no larger than the result, or if it is faster than
// gathering the weights by edge id (orders_weights). by_edge: a weight or scale per edge, for a kernel of 32-bit
// indices and 16-byte vectors. value_bytes: of the array; gathered_bytes: of the rows; has_weight: there are weights,
// not only scales.
inline bool fills_values(bool by_edge, bool has_weight, int64_t value_bytes, int64_t gathered_bytes,
                         int64_t result_bytes, int slices, int64_t slice_bytes) {
  if (!by_edge || value_bytes == 0) return false;
  return (slices > 1 && value_bytes <= result_bytes) ||
         (has_weight && orders_weights(value_bytes, gathered_bytes, slice_bytes));
}

}  // namespace edgeless::cuda::spmm
