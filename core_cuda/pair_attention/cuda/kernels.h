// Host entry points of the CUDA kernels of attention over pairs. No CUDA and no torch.
#pragma once

#include "../../attention/cuda/plan.h"
#include "../../jit/queue.h"
#include "args.h"

namespace edgeless::cuda {

// Most vectors of 16 bytes per row.
constexpr int kMostPairVectors = 32;

// Edges per batch. Short rows use small batches, because the unused part of a batch still costs instructions.
constexpr int pair_edges(int64_t edges, int64_t rows) {
  return edges < kFewEdgesARow * rows ? 2 : edges < kManyEdgesARow * rows ? 4 : 8;
}

// Target occupancy in blocks per SM, for __launch_bounds__ and the planner. numbers: elements per vector.
constexpr int pair_blocks(Pass pass, int numbers, int edges) {
  const bool forward = pass == Pass::forward, many = edges > 4;
  if (numbers > 4) return forward ? many ? 5 : 6 : many ? 4 : 5;
  return forward ? many ? 5 : 8 : many ? 5 : edges > 2 ? 6 : 7;
}

// problem.pass must be forward or by_src, its score gat, with one head.
inline Plan pair_plan(const Problem& problem, const Device& device) {
  Plan plan;
  plan.kernel.vectors = 1, plan.kernel.lanes = 8;
  while (plan.kernel.lanes < problem.value_vectors) plan.kernel.lanes *= 2;
  plan.kernel.edges = pair_edges(problem.num_edges, problem.num_rows);
  plan.layout.sub_warp_log2 = choose_sub_warp_log2(plan.kernel, problem.value_vectors);
  choose_partition(problem, device, pair_blocks(problem.pass, vector_numbers(problem.storage), plan.kernel.edges),
                   false, plan);
  return plan;
}

// Runs one pass and the merge of its hubs, for 32-bit indices and rows that are not float64.
void run_pair_pass(const Problem& problem, const Plan& plan, const PairArgs& args, const jit::Queue& queue);

// a: gradients, b: results. stats = (shift[0], shift[1], <a, b>, 0); shares: partial column sums of a.
void run_deltas(Storage storage, const RowSumsArgs& args, const jit::Queue& queue);

// a: float rows, b: weights. out = a + factor * row; shares: partial column sums of factor * b.
void run_outer_rows(Storage storage, const RowSumsArgs& args, const jit::Queue& queue);

void run_sum_shares(Storage storage, const SharesArgs& args, const jit::Queue& queue);

// weights = 1 for every pair, followed by the sum of ds over the edges of every segment; rows = a copy of vectors.
void run_prepare(const PrepareArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda
