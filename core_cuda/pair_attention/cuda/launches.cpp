// Launches of the kernels of attention over pairs: the passes with the merge of their hubs, the row-wise kernels around
// them, and the kernels that build the index arrays.
#include <algorithm>

#include "../../common/merge_launch.h"
#include "../../common/threads.h"
#include "expression.h"
#include "kernels.h"
#include "walks.h"

namespace edgeless::cuda {
namespace {

void launch_merge(const char* kernel, Storage storage, const Plan& plan, int64_t numbers, const PairArgs& args,
                  const jit::Queue& queue) {
  const jit::Expression of("pair_attention/cuda/merge.cuh", kernel, {type_of(storage)});
  jit::launch(queue, of, {merge_grid(plan.slots, numbers), kMergeThreads}, args);
}

}  // namespace

void run_pair_pass(const Problem& problem, const Plan& plan, const PairArgs& args, const jit::Queue& queue) {
  const bool forward = problem.pass == Pass::forward, dropout = args.drawn_by;
  const jit::Expression kernel = pair_expression(problem.pass, problem.storage, plan.kernel, dropout);
  jit::launch(queue, kernel, {args.part.num_ranges, kBlockThreads}, args);
  if (!plan.hubs) return;
  if (forward) {
    launch_merge("merge_forward_kernel", problem.storage, plan, args.carry_size, args, queue);
  } else if (args.grad_value) {
    launch_merge("merge_by_src_kernel", problem.storage, plan, args.grad_value.dim, args, queue);
  }
}

void run_deltas(Storage storage, const RowSumsArgs& args, const jit::Queue& queue) {
  jit::launch(queue, deltas_expression(storage, args.vectors), {args.blocks, kRowThreads}, args);
}

void run_outer_rows(Storage storage, const RowSumsArgs& args, const jit::Queue& queue) {
  const jit::Expression kernel = pair_rows_expression("outer_rows_kernel", storage, args.vectors);
  jit::launch(queue, kernel, {args.blocks, kRowThreads}, args);
}

void run_sum_shares(Storage storage, const SharesArgs& args, const jit::Queue& queue) {
  const jit::Size grid((args.width + kShareLanes - 1) / kShareLanes, args.sums);
  const jit::Expression kernel("pair_attention/cuda/rows.cuh", "sum_shares_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {grid, {kShareLanes, kShareSides}}, args);
}

void run_prepare(const PrepareArgs& args, const jit::Queue& queue) {
  const int64_t items = args.segments + args.pairs + args.vector_words;
  const jit::Size grid((items + kRowThreads - 1) / kRowThreads);
  jit::launch(queue, {"pair_attention/cuda/rows.cuh", "prepare_kernel"}, {grid, kRowThreads}, args);
}

template <class I>
void make_walks(const WalksArgs<I>& args, void* scratch, const jit::Queue& queue) {
  constexpr const char* kHeader = "pair_attention/cuda/walks.cuh";
  const int64_t most = std::max(args.edges, args.nodes) + 1;
  jit::launch(queue, {kHeader, "prepare_walks_kernel", {type_of<I>()}}, {blocks_for(most), kThreads}, args);
  exclusive_sum(args.begins, args.segments + 1, sizeof(I) == sizeof(int64_t), scratch, queue);
  const int64_t threads = std::max({args.segments, args.pairs, args.nodes, int64_t{1}});
  jit::launch(queue, {kHeader, "walk_segments_kernel", {type_of<I>()}}, {blocks_for(threads), kThreads}, args);
}

template void make_walks(const WalksArgs<int32_t>&, void*, const jit::Queue&);
template void make_walks(const WalksArgs<int64_t>&, void*, const jit::Queue&);

}  // namespace edgeless::cuda
