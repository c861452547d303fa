// Launches the kernels of merge.cuh.
#include "merge.cuh"

#include "kernels.h"

namespace edgeless::cuda {
namespace {

template <class S, class I>
cudaError_t merge(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  const dim3 grid = merge_grid(plan.slots, int64_t{args.heads} * args.carry_size);
  if (problem.pass == Pass::forward) {
    merge_softmax_kernel<S, I><<<grid, kMergeThreads, 0, stream>>>(args);
  } else {
    const int lanes = kVec<S>;
    const int split = problem.score == Score::gat ? 1 : args.key_vectors * lanes;
    const OutRows first = problem.pass == Pass::by_dst ? args.grad_dst : args.grad_src;
    const OutRows second = problem.pass == Pass::by_dst ? OutRows{} : args.grad_value;
    merge_sum_kernel<S, I><<<grid, kMergeThreads, 0, stream>>>(args, first, second, split);
  }
  return cudaGetLastError();
}

template <class S>
cudaError_t merge(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args, cudaStream_t stream) {
  return problem.wide_index ? merge<S, int64_t>(problem, plan, args, stream)
                            : merge<S, int32_t>(problem, plan, args, stream);
}

}  // namespace

template <>
cudaError_t merge_pieces(const Problem& problem, const Plan& plan, const Args<float>& args, cudaStream_t stream) {
  switch (problem.storage) {
    case Storage::f32: return merge<float>(problem, plan, args, stream);
    case Storage::f16: return merge<__half>(problem, plan, args, stream);
    case Storage::bf16: return merge<__nv_bfloat16>(problem, plan, args, stream);
    case Storage::f16x4: return merge<OfFour<__half>>(problem, plan, args, stream);
    case Storage::bf16x4: return merge<OfFour<__nv_bfloat16>>(problem, plan, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <>
cudaError_t merge_pieces(const Problem& problem, const Plan& plan, const Args<double>& args, cudaStream_t stream) {
  return merge<double>(problem, plan, args, stream);
}

}  // namespace edgeless::cuda
