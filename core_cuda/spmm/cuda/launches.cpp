// Launches the kernels of SpMM and SDDMM, and those around cuSPARSE.
#include <stdexcept>
#include <type_traits>

#include "../../common/merge_launch.h"
#include "../../common/threads.h"
#include "edge_values.h"
#include "expression.h"
#include "kernels.h"

namespace edgeless::cuda::spmm {
namespace {

template <class A>
constexpr jit::Type kSpmmArgs{std::is_same_v<A, double> ? "edgeless::cuda::spmm::SpmmArgs<double>"
                                                        : "edgeless::cuda::spmm::SpmmArgs<float>"};

}  // namespace

template <class A>
void run_spmm(Storage storage, bool wide_index, int words, const SpmmArgs<A>& args, const jit::Queue& queue) {
  if (words * 4 < size_of(storage)) throw std::logic_error("edgeless: a vector holds no value of this type");
  const SumWeights weights{args.weight || args.column_scale, args.weight_by_head, args.values != nullptr};
  const SumKernel use =
      sum_kernel(wide_index, words, weights, args.plan.sub_warp_log2, args.graph.num_edges, args.graph.num_rows);
  const jit::Expression kernel = sum_expression(storage, wide_index, words, use);
  jit::launch(queue, kernel, {{args.plan.part.num_ranges, args.plan.slices}, kReduceThreads}, args);
  const jit::Type stored = type_of(storage), index = index_type(wide_index);
  merge_reduced(queue, kSumHeader, {"spmm::SumReducer", {stored, index, words, use.weighing, kUsualBatch}}, wide_index,
                kSpmmArgs<A>, args);
}

template <class A>
void fill_values(const SpmmArgs<A>& args, A* values, const jit::Queue& queue) {
  const jit::Expression kernel("spmm/cuda/values.cuh", "spmm::values_kernel", {type_of<A>()});
  jit::launch(queue, kernel, {blocks_for(args.graph.num_edges), kThreads}, args, values);
}

template <class A>
void run_sddmm(Storage storage, bool wide_index, const SddmmArgs<A>& args, const jit::Queue& queue) {
  const jit::Expression kernel = sampled_expression(storage, wide_index, args.vectors);
  if (args.vectors == 1) {
    jit::launch(queue, kernel, {blocks_for_edges(args.graph), kThreads}, args);
    return;
  }
  const int64_t blocks = (args.graph.num_edges + args.edges_of_block - 1) / args.edges_of_block;
  jit::launch(queue, kernel, {{blocks, args.heads}, kThreads}, args);
}

template <class A>
void fill_edge_values(const EdgeValues<A>& args, Storage storage, bool wide_index, void* values,
                      const jit::Queue& queue) {
  const jit::Expression kernel("spmm/cuda/edge_values.cuh", "spmm::fill_kernel",
                               {type_of(storage), type_of<A>(), index_type(wide_index)});
  jit::launch(queue, kernel, {blocks_for(args.graph.num_edges), kThreads}, args, values);
}

template <class A>
void place_products(const EdgeValues<A>& args, bool wide_index, const A* by_position, A* products,
                    const jit::Queue& queue) {
  const jit::Expression kernel("spmm/cuda/edge_values.cuh", "spmm::place_kernel",
                               {type_of<A>(), index_type(wide_index)});
  jit::launch(queue, kernel, {blocks_for(args.graph.num_edges), kThreads}, args, by_position, products);
}

#define EDGELESS_SPMM(A)                                                                            \
  template void run_spmm<A>(Storage, bool, int, const SpmmArgs<A>&, const jit::Queue&);             \
  template void fill_values<A>(const SpmmArgs<A>&, A*, const jit::Queue&);                          \
  template void run_sddmm<A>(Storage, bool, const SddmmArgs<A>&, const jit::Queue&);                \
  template void fill_edge_values<A>(const EdgeValues<A>&, Storage, bool, void*, const jit::Queue&); \
  template void place_products<A>(const EdgeValues<A>&, bool, const A*, A*, const jit::Queue&);
EDGELESS_SPMM(float)
EDGELESS_SPMM(double)
#undef EDGELESS_SPMM

}  // namespace edgeless::cuda::spmm
