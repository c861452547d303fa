// Launches the kernels of neighbor_reduce.
#include <algorithm>

#include "../../common/merge_launch.h"
#include "expression.h"
#include "kernels.h"

namespace edgeless::cuda::reduction {
namespace {

constexpr jit::Type kGatherArgs{"edgeless::cuda::reduction::GatherArgs"};

jit::Shape reduce_shape(const ReducePlan& plan) { return {{plan.part.num_ranges, plan.slices}, kReduceThreads}; }

int64_t scatter_blocks(int64_t threads) { return (threads + kScatterThreads - 1) / kScatterThreads; }

// Scatters the gradients of a feature tile; rest: those that are not finite.
void send(Storage storage, bool wide_index, bool rest, const ScatterArgs& args, int64_t most_blocks,
          const jit::Queue& queue) {
  const jit::Expression kernel = send_expression(storage, wide_index, rest);
  const int64_t blocks = scatter_blocks(args.graph.num_rows << args.columns_log2);
  jit::launch(queue, kernel, {std::min(blocks, most_blocks), kScatterThreads}, args);
  if (!args.shares) return;
  const jit::Expression share(kScatterHeader, "reduction::share_kernel",
                              {type_of(storage), index_type(wide_index), rest});
  const int columns = 16 / size_of(storage) << args.plan.sub_warp_log2;  // of a sub-warp
  jit::launch(queue, share, {{args.plan.part.num_ranges, (args.columns + columns - 1) / columns}, kReduceThreads},
              args);
}

}  // namespace

void run_reduce(Storage storage, bool wide_index, bool shares, const ReduceArgs& args, const jit::Queue& queue) {
  const jit::Expression kernel = reduce_expression(storage, wide_index, shares, args.is_max);
  jit::launch(queue, kernel, reduce_shape(args.plan), args);
  const jit::Type stored = type_of(storage), index = index_type(wide_index);
  merge_reduced(queue, kExtremumHeader, {"reduction::BestReducer", {stored, index, shares, args.is_max}}, wide_index,
                {"edgeless::cuda::reduction::ReduceArgs"}, args);
}

void edge_positions(const CompressedGraph& graph, const Partition& part, int32_t* positions, const jit::Queue& queue) {
  const jit::Expression kernel("reduction/cuda/positions.cuh", "reduction::positions_kernel");
  jit::launch(queue, kernel, {part.num_ranges, kReduceThreads}, graph, part, positions);
}

void gather_grad(Storage storage, bool shares, const GatherArgs& args, const jit::Queue& queue) {
  const jit::Expression kernel = gather_grad_expression(storage, args.arg_size, shares);
  jit::launch(queue, kernel, reduce_shape(args.plan), args);
  const jit::Type stored = type_of(storage), argument = argument_type(args.arg_size);
  merge_reduced(queue, kGatherHeader, {"reduction::GatherGradReducer", {stored, argument, shares, kGatherBatch}}, false,
                kGatherArgs, args);
}

void measure(Storage storage, const ScatterArgs& args, const jit::Queue& queue) {
  jit::clear(queue, args.largest, (args.width + int64_t{2}) * (storage == Storage::f64 ? 8 : 4));
  const int64_t across = (args.width + 31) / 32, down = (args.graph.num_rows + 63) / 64;
  const jit::Expression kernel(kScatterHeader, "reduction::measure_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {{across, std::min<int64_t>(down, 8192 / across + 1)}, {32, 8}}, args);
}

void slice(Storage storage, bool wide_index, const ScatterArgs& args, const jit::Queue& queue) {
  send(storage, wide_index, false, args, UINT32_MAX, queue);
  const int64_t fours = (args.num_columns << args.columns_log2) / kFinished;
  const jit::Expression kernel(kScatterHeader, "reduction::finish_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {scatter_blocks(fours), kScatterThreads}, args);
}

void rest(Storage storage, bool wide_index, const ScatterArgs& args, const jit::Queue& queue) {
  send(storage, wide_index, true, args, 2048, queue);
}

void shared_scatter_grad(Storage storage, bool wide_index, const SharedScatterArgs& args, const jit::Queue& queue) {
  const jit::Expression kernel = shared_scatter_grad_expression(storage, wide_index, args.owners_log2 > 0);
  const int64_t blocks = args.groups << args.owners_log2;
  const int64_t bytes = int64_t{args.nodes} * 8 << args.scatter.columns_log2;
  jit::launch(queue, kernel, {blocks, kSharedScatterThreads, bytes, 1 << args.owners_log2}, args);
}

}  // namespace edgeless::cuda::reduction
