// The passes over pairs by storage type, and what merges the pieces of hubs: rows so long that several blocks walk them
// (common/partition.cuh), in their order.
#include "../../common/merge.cuh"
#include "kernels.h"

namespace edgeless::cuda {

template <class S>
cudaError_t pair_pass_instance(const Problem& problem, const Kernel& kernel, const PairArgs& args, cudaStream_t stream);

namespace {

// Piece number `piece` of a hub.
__device__ const float* piece_at(const PairArgs& args, const Hub& hub, int64_t piece) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.piece);
  return args.carry + (piece == 0 ? hub.slot : slots + hub.slot + piece - 1) * args.carry_size;
}

template <class S>
__global__ void __launch_bounds__(kMergeThreads) merge_forward_kernel(const __grid_constant__ PairArgs args) {
  const int dim = args.out.dim;
  for_each_hub<int32_t>(args.graph, args.part, [&](const Hub& hub) {
    merge_softmax<float, true>(
        hub.pieces, 1, args.carry_size, [&](int64_t p) { return piece_at(args, hub, p); },
        [&](int k, float sum, float top, float total) {
          if (k == 0) args.shift[hub.row] = top, args.shift[args.graph.num_rows + hub.row] = log_base_two(total);
          if (k >= dim) return;
          const float bias = args.bias ? to_arithmetic(static_cast<const S*>(args.bias)[k]) : 0.0f;
          const int64_t at = hub.row * dim + k;
          if (args.sums) reinterpret_cast<S*>(args.sums.base)[at] = to_storage<S>(sum / total);
          reinterpret_cast<S*>(args.out.base)[at] = to_storage<S>(sum / total + bias);
        });
  });
}

template <class S>
__global__ void __launch_bounds__(kMergeThreads) merge_by_src_kernel(const __grid_constant__ PairArgs args) {
  const int dim = args.grad_value.dim;
  for_each_hub<int32_t>(args.graph, args.part, [&](const Hub& hub) {
    sum_pieces<float>(
        hub.pieces, dim, [&](int64_t p) { return piece_at(args, hub, p); },
        [&](int k, float sum) { reinterpret_cast<S*>(args.grad_value.base)[hub.row * dim + k] = to_storage<S>(sum); });
  });
}

template <class S>
cudaError_t run(const Problem& problem, const Plan& plan, const PairArgs& args, cudaStream_t stream) {
  const cudaError_t error = pair_pass_instance<S>(problem, plan.kernel, args, stream);
  if (error != cudaSuccess || !plan.hubs) return error;
  if (problem.pass == Pass::forward) {
    merge_forward_kernel<S><<<merge_grid(plan.slots, args.carry_size), kMergeThreads, 0, stream>>>(args);
  } else if (args.grad_value) {
    merge_by_src_kernel<S><<<merge_grid(plan.slots, args.grad_value.dim), kMergeThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_pair_pass(const Problem& problem, const Plan& plan, const PairArgs& args, cudaStream_t stream) {
  switch (problem.storage) {
    case Storage::f32: return run<float>(problem, plan, args, stream);
    case Storage::f16: return run<__half>(problem, plan, args, stream);
    case Storage::bf16: return run<__nv_bfloat16>(problem, plan, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace edgeless::cuda
