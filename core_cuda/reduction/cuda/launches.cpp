// Launches the kernels of neighbor_reduce.
#include <algorithm>

#include "../../common/merge_launch.h"
#include "kernels.h"

namespace edgeless::cuda::reduction {
namespace {

constexpr jit::Type kGatherArgs{"edgeless::cuda::reduction::GatherArgs"};

// The type of arguments of so many bytes.
jit::Type argument_type(int arg_size) { return arg_size == 1 ? kUint8Type : arg_size == 2 ? kUint16Type : kUint32Type; }

jit::Shape fold_shape(const FoldPlan& plan) { return {{plan.part.num_ranges, plan.slices}, kFoldThreads}; }

int64_t scatter_blocks(int64_t threads) { return (threads + kScatterThreads - 1) / kScatterThreads; }

// Scatters the gradients of a feature tile; rest: those that are not finite.
void send(Storage storage, bool wide_index, bool rest, const ScatterArgs& args, int64_t most_blocks,
          const jit::Queue& queue) {
  const char* const header = "reduction/cuda/scatter_grad.cuh";
  const jit::Type stored = type_of(storage), index = index_type(wide_index);
  const jit::Expression kernel(header, "reduction::send_kernel", {stored, index, rest});
  const int64_t blocks = scatter_blocks(args.graph.num_rows << args.columns_log2);
  jit::launch(queue, kernel, {std::min(blocks, most_blocks), kScatterThreads}, args);
  if (!args.shares) return;
  const jit::Expression share(header, "reduction::share_kernel", {stored, index, rest});
  const int columns = 16 / size_of(storage) << args.plan.team_log2;  // of a sub-warp
  jit::launch(queue, share, {{args.plan.part.num_ranges, (args.columns + columns - 1) / columns}, kFoldThreads}, args);
}

}  // namespace

void run_reduce(Storage storage, bool wide_index, bool shares, const ReduceArgs& args, const jit::Queue& queue) {
  const char* const header = "reduction/cuda/extremum.cuh";
  const jit::Type stored = type_of(storage), index = index_type(wide_index);
  const jit::Expression kernel(header, "reduction::reduce_kernel", {stored, index, shares, args.is_max});
  jit::launch(queue, kernel, fold_shape(args.plan), args);
  merge_fold(queue, header, {"reduction::BestFold", {stored, index, shares, args.is_max}}, wide_index,
             {"edgeless::cuda::reduction::ReduceArgs"}, args);
}

void edge_positions(const CompressedGraph& graph, const Partition& part, int32_t* positions, const jit::Queue& queue) {
  const jit::Expression kernel("reduction/cuda/positions.cuh", "reduction::positions_kernel");
  jit::launch(queue, kernel, {part.num_ranges, kFoldThreads}, graph, part, positions);
}

void gather_grad(Storage storage, bool shares, const GatherArgs& args, const jit::Queue& queue) {
  const char* const header = "reduction/cuda/gather_grad.cuh";
  const jit::Type stored = type_of(storage), argument = argument_type(args.arg_size);
  const jit::Expression kernel(header, "reduction::gather_grad_kernel", {stored, argument, shares});
  jit::launch(queue, kernel, fold_shape(args.plan), args);
  merge_fold(queue, header, {"reduction::GatherGradFold", {stored, argument, shares, kGatherBatch}}, false, kGatherArgs,
             args);
}

void argument_bytes(const void* arg, int arg_size, int64_t count, uint8_t* bytes, const jit::Queue& queue) {
  const int64_t fours = count / 4;
  const jit::Expression kernel("reduction/cuda/masked_gather_grad.cuh", "reduction::bytes_kernel",
                               {argument_type(arg_size)});
  jit::launch(queue, kernel, {(fours + kByteThreads - 1) / kByteThreads, kByteThreads}, arg, fours,
              reinterpret_cast<uint32_t*>(bytes));
}

void masked_gather_grad(const GatherArgs& args, const jit::Queue& queue) {
  const char* const header = "reduction/cuda/masked_gather_grad.cuh";
  const jit::Type argument = argument_type(args.arg_size);
  const jit::Expression kernel(header, "reduction::masked_gather_grad_kernel", {argument});
  jit::launch(queue, kernel, fold_shape(args.plan), args);
  merge_fold(queue, header, {"reduction::MaskedGatherGradFold", {argument, kPickBatch}}, false, kGatherArgs, args);
}

void sorted_grad(Storage storage, const SortArgs& args, const jit::Queue& queue) {
  const char* const header = "reduction/cuda/sorted_grad.cuh";
  const jit::Type stored = type_of(storage);
  const int lanes = 1 << args.plan.team_log2;
  constexpr int kRows = kSortThreads / 32;
  const jit::Expression sort(header, "reduction::sort_kernel",
                             {stored, argument_type(args.arg_size), lanes * kSortPer});
  jit::launch(queue, sort, {(args.csr.num_rows + kRows - 1) / kRows, kSortThreads}, args);
  // An edge has columns / degree items on average; lanes load two at a time where that fills half a sub-warp or more.
  const bool many = args.graph.num_edges <= 2 * kSortPer * args.csr.num_rows;
  const jit::Expression take(header, "reduction::sorted_grad_kernel", {stored, lanes, many ? 2 : 1});
  jit::launch(queue, take, {args.plan.part.num_ranges, kFoldThreads}, args);
  merge_fold(queue, header, {"reduction::TakenSums", {stored, lanes}}, false, {"edgeless::cuda::reduction::SortArgs"},
             args);
}

void measure(Storage storage, const ScatterArgs& args, const jit::Queue& queue) {
  jit::clear(queue, args.largest, (args.width + int64_t{2}) * (storage == Storage::f64 ? 8 : 4));
  const int64_t across = (args.width + 31) / 32, down = (args.graph.num_rows + 63) / 64;
  const jit::Expression kernel("reduction/cuda/scatter_grad.cuh", "reduction::measure_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {{across, std::min<int64_t>(down, 8192 / across + 1)}, {32, 8}}, args);
}

void slice(Storage storage, bool wide_index, const ScatterArgs& args, const jit::Queue& queue) {
  send(storage, wide_index, false, args, UINT32_MAX, queue);
  const int64_t fours = (args.num_columns << args.columns_log2) / kFinished;
  const jit::Expression kernel("reduction/cuda/scatter_grad.cuh", "reduction::finish_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {scatter_blocks(fours), kScatterThreads}, args);
}

void rest(Storage storage, bool wide_index, const ScatterArgs& args, const jit::Queue& queue) {
  send(storage, wide_index, true, args, 2048, queue);
}

void shared_scatter_grad(Storage storage, bool wide_index, const SharedScatterArgs& args, const jit::Queue& queue) {
  const bool cluster = args.owners_log2 > 0;
  const jit::Expression kernel("reduction/cuda/shared_scatter_grad.cuh", "reduction::shared_scatter_grad_kernel",
                               {type_of(storage), index_type(wide_index), cluster});
  const int64_t blocks = args.groups << args.owners_log2;
  const int64_t bytes = int64_t{args.nodes} * 8 << args.scatter.columns_log2;
  jit::launch(queue, kernel, {blocks, kSharedScatterThreads, bytes, 1 << args.owners_log2}, args);
}

}  // namespace edgeless::cuda::reduction
