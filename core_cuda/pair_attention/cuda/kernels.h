// The entries of the CUDA kernels of attention over pairs. Each returns the error of its launches.
#pragma once

#include "../../attention/cuda/plan.h"
#include "args.h"

namespace edgeless::cuda {

// Vectors of 16 bytes that a row may have.
constexpr int kMostPairVectors = 32;

// Edges of a batch. Where rows are short, places beyond a row's end cost instructions.
constexpr int pair_edges(int64_t edges, int64_t rows) {
  return edges < kFewEdgesARow * rows ? 2 : edges < kManyEdgesARow * rows ? 4 : 8;
}

// Blocks that a multiprocessor is to hold: as many as leave a kernel its registers. numbers: of a vector.
constexpr int pair_blocks(Pass pass, int numbers, int edges) {
  const bool forward = pass == Pass::forward, many = edges > 4;
  if (numbers > 4) return forward ? many ? 5 : 6 : many ? 4 : 5;
  return forward ? many ? 5 : 8 : many ? 5 : edges > 2 ? 6 : 7;
}

// problem.pass is forward or by_src; its score is gat, of one head.
inline Plan pair_plan(const Problem& problem, const Device& device) {
  Plan plan;
  plan.kernel.vectors = 1, plan.kernel.lanes = 8;
  while (plan.kernel.lanes < problem.value_vectors) plan.kernel.lanes *= 2;
  plan.kernel.edges = pair_edges(problem.num_edges, problem.num_rows);
  plan.layout.team_log2 = choose_team_log2(plan.kernel, problem.value_vectors);
  choose_partition(problem, device, pair_blocks(problem.pass, vector_numbers(problem.storage), plan.kernel.edges),
                   false, plan);
  return plan;
}

// A pass, and what merges the pieces of its hubs. Not of doubles; 32-bit indices.
cudaError_t run_pair_pass(const Problem& problem, const Plan& plan, const PairArgs& args, cudaStream_t stream);

// a: gradients, b: results. stats = (shift, <a, b>, 0), shares of the sums of a.
cudaError_t run_deltas(Storage storage, const RowSumsArgs& args, cudaStream_t stream);

// a: sums of floats, b: weights. out = a + factor row, shares of the sums of factor b.
cudaError_t run_outer_rows(Storage storage, const RowSumsArgs& args, cudaStream_t stream);

cudaError_t run_sum_shares(Storage storage, const SharesArgs& args, cudaStream_t stream);

// weights = 1 for every pair and, behind them, the sums of ds over the edges of every piece; rows = vectors.
cudaError_t run_prepare(const PrepareArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda
