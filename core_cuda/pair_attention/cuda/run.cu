// Dispatch of the passes over pairs by storage type, and launches of the merge of hubs (merge.cuh).
#include "merge.cuh"

#include "kernels.h"

namespace edgeless::cuda {

template <class S>
cudaError_t pair_pass_instance(const Problem& problem, const Kernel& kernel, const PairArgs& args, cudaStream_t stream);

namespace {

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
