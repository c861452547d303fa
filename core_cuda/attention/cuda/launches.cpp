// Launches the kernels of the passes and of merge.cuh, weights.cuh and edges.cuh.
#include <cstdint>
#include <utility>
#include <vector>

#include "../../common/merge_launch.h"
#include "../../common/threads.h"
#include "../../jit/launch.h"
#include "expression.h"
#include "kernels.h"

namespace edgeless::cuda {
namespace {

// One block per range of the partition and per head tile.
jit::Size grid_of(const Partition& part, const Layout& layout, int heads) {
  return {part.num_ranges, (heads + layout.heads_per_slice - 1) / layout.heads_per_slice};
}

constexpr const char *kMergeSoftmax = "merge_softmax_kernel", *kMergeSum = "merge_sum_kernel";

jit::Expression merge_kernel(const char* function, const Problem& problem) {
  return {"attention/cuda/merge.cuh", function, {type_of(problem.storage), index_type(problem.wide_index)}};
}

}  // namespace

void prepare_passes(const Problem& forward, const Plan& plan, const Device& device, int64_t max_degree,
                    const jit::Queue& queue) {
  const auto kernel = [](const Problem& p, const Plan& of) {
    return expression_of(p.pass, p.score, p.storage, of.kernel);
  };
  if (jit::is_loaded(queue, kernel(forward, plan))) return;
  std::vector<jit::Expression> kernels{kernel(forward, plan)};
  for (const Pass pass : {Pass::by_dst, Pass::by_src}) {
    Problem problem = forward;
    problem.pass = pass;
    if (pass == Pass::by_src) {
      std::swap(problem.num_rows, problem.num_gathered);
      problem.max_degree = max_degree;
    }
    const Plan planned = make_plan(problem, device);
    if (planned.kernel.vectors > 0) kernels.push_back(kernel(problem, planned));
  }
  if (plan.hubs) {
    for (const char* merge : {kMergeSoftmax, kMergeSum}) kernels.push_back(merge_kernel(merge, forward));
  }
  jit::prepare(queue, kernels);
}

template <class A>
void run_pass(const Problem& problem, const Plan& plan, const Args<A>& args, const jit::Queue& queue) {
  const jit::Expression kernel = expression_of(problem.pass, problem.score, problem.storage, plan.kernel);
  jit::launch(queue, kernel, {grid_of(args.part, args.layout, args.heads), kBlockThreads}, args);
}

template <class A>
void merge_segments(const Problem& problem, const Plan& plan, const Args<A>& args, const jit::Queue& queue) {
  const jit::Shape shape{merge_grid(plan.slots, int64_t{args.heads} * args.carry_size), kMergeThreads};
  if (problem.pass == Pass::forward) {
    jit::launch(queue, merge_kernel(kMergeSoftmax, problem), shape, args);
  } else {
    const int split = problem.score == Score::gat ? 1 : args.key_vectors * vector_numbers(problem.storage);
    const OutRows first = problem.pass == Pass::by_dst ? args.grad_dst : args.grad_src;
    const OutRows second = problem.pass == Pass::by_dst ? OutRows{} : args.grad_value;
    jit::launch(queue, merge_kernel(kMergeSum, problem), shape, args, first, second, split);
  }
}

template <class A>
void normalize_weights(const Args<A>& args, bool wide_index, const jit::Queue& queue) {
  const int64_t items = args.graph.num_rows * args.heads;
  if (items == 0) return;
  const jit::Expression kernel("attention/cuda/weights.cuh", "normalize_weights_kernel",
                               {type_of<A>(), index_type(wide_index)});
  jit::launch(queue, kernel, {(items + kWeightWarps - 1) / kWeightWarps, kWeightThreads}, args);
}

template <class A>
void sum_rows(const A* in, int64_t rows, const A* more, int64_t more_rows, int64_t cols, int sums, void* out,
              Storage storage, const jit::Queue& queue) {
  const jit::Expression kernel("attention/cuda/edges.cuh", "sum_rows_kernel", {type_of<A>(), type_of(storage)});
  const int64_t all_rows = rows + more_rows;
  jit::launch(queue, kernel, {{(cols + 31) / 32, sums}, kThreads}, in, rows, more, all_rows, cols, out);
}

void row_delta(const Rows& grad, Storage storage, const Rows& out, int64_t rows, int heads, int vectors, void* rounded,
               float* delta, const jit::Queue& queue) {
  if (rows * heads == 0) return;
  const jit::Expression kernel("attention/cuda/edges.cuh", "row_delta_kernel", {type_of(storage), rounded != nullptr});
  jit::launch(queue, kernel, {blocks_for(rows * heads * 4), kThreads}, grad, out, rows, heads, vectors, rounded, delta);
}

template <class A>
void inverse_norms(const Rows& rows, Storage storage, int64_t num_rows, int heads, int vectors, A least, A* over,
                   const jit::Queue& queue) {
  if (num_rows * heads == 0) return;
  const jit::Expression kernel("attention/cuda/edges.cuh", "inverse_norms_kernel", {type_of<A>(), type_of(storage)});
  jit::launch(queue, kernel, {blocks_for(num_rows * heads * 4), kThreads}, rows, num_rows, heads, vectors, least, over);
}

template <class A>
void row_dot(const CompressedGraph& graph, bool wide_index, const A* a, const A* b, int heads, A* out,
             const jit::Queue& queue) {
  if (graph.num_rows * heads == 0) return;
  const jit::Expression kernel("attention/cuda/edges.cuh", "row_dot_kernel", {type_of<A>(), index_type(wide_index)});
  jit::launch(queue, kernel, {{graph.num_rows, heads}, kThreads}, graph, a, b, heads, out);
}

#define EDGELESS_INSTANTIATE(A)                                                                                  \
  template void run_pass(const Problem&, const Plan&, const Args<A>&, const jit::Queue&);                        \
  template void merge_segments(const Problem&, const Plan&, const Args<A>&, const jit::Queue&);                  \
  template void normalize_weights(const Args<A>&, bool, const jit::Queue&);                                      \
  template void sum_rows(const A*, int64_t, const A*, int64_t, int64_t, int, void*, Storage, const jit::Queue&); \
  template void inverse_norms(const Rows&, Storage, int64_t, int, int, A, A*, const jit::Queue&);                \
  template void row_dot(const CompressedGraph&, bool, const A*, const A*, int, A*, const jit::Queue&);
EDGELESS_INSTANTIATE(float)
EDGELESS_INSTANTIATE(double)
#undef EDGELESS_INSTANTIATE

}  // namespace edgeless::cuda
