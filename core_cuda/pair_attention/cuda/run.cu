// The passes over pairs by storage type, and what merges the pieces of hubs: rows so long that several blocks walk them
// (common/partition.cuh), in their order.
#include "../../common/partition.cuh"
#include "../../common/vec.cuh"
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
  const int width = args.carry_size - 2;
  for_each_hub<int32_t>(args.graph, args.part, [&](const Hub& hub) {
    float m = -INFINITY, l = 0;
    for (int64_t p = 0; p < hub.pieces; ++p) m = max(m, piece_at(args, hub, p)[width]);
    for (int64_t p = 0; p < hub.pieces; ++p) {
      const float* piece = piece_at(args, hub, p);
      l += piece[width + 1] * power_of_two((piece[width] - m) * float(kLog2e));
    }
    for (int k = threadIdx.x; k < args.out.dim; k += kMergeThreads) {
      float sum = 0;
      for (int64_t p = 0; p < hub.pieces; ++p) {
        const float* piece = piece_at(args, hub, p);
        sum = fmaf(piece[k], power_of_two((piece[width] - m) * float(kLog2e)), sum);
      }
      const float bias = args.bias ? to_arithmetic(static_cast<const S*>(args.bias)[k]) : 0.0f;
      const int64_t at = hub.row * args.out.dim + k;
      if (args.sums) reinterpret_cast<S*>(args.sums.base)[at] = to_storage<S>(sum / l);
      reinterpret_cast<S*>(args.out.base)[at] = to_storage<S>(sum / l + bias);
    }
    if (threadIdx.x == 0) args.shift[hub.row] = m, args.shift[args.graph.num_rows + hub.row] = log_base_two(l);
  });
}

template <class S>
__global__ void __launch_bounds__(kMergeThreads) merge_by_src_kernel(const __grid_constant__ PairArgs args) {
  for_each_hub<int32_t>(args.graph, args.part, [&](const Hub& hub) {
    for (int k = threadIdx.x; k < args.grad_value.dim; k += kMergeThreads) {
      float sum = 0;
#pragma unroll 4
      for (int64_t p = 0; p < hub.pieces; ++p) sum += piece_at(args, hub, p)[k];
      reinterpret_cast<S*>(args.grad_value.base)[hub.row * args.grad_value.dim + k] = to_storage<S>(sum);
    }
  });
}

template <class S>
cudaError_t run(const Problem& problem, const Plan& plan, const PairArgs& args, cudaStream_t stream) {
  const cudaError_t error = pair_pass_instance<S>(problem, plan.kernel, args, stream);
  if (error != cudaSuccess || !plan.hubs) return error;
  const unsigned blocks = merge_blocks(plan.slots);
  if (problem.pass == Pass::forward) {
    merge_forward_kernel<S><<<blocks, kMergeThreads, 0, stream>>>(args);
  } else if (args.grad_value) {
    merge_by_src_kernel<S><<<blocks, kMergeThreads, 0, stream>>>(args);
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
