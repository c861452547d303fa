// The kernels of neighbor_reduce: header and template arguments, for launches and printed plans. No CUDA and no torch.
#pragma once

#include "../../common/kernel_types.h"
#include "args.h"
#include "plan.h"

namespace edgeless::cuda::reduction {

inline constexpr const char *kExtremumHeader = "reduction/cuda/extremum.cuh",
                            *kGatherHeader = "reduction/cuda/gather_grad.cuh",
                            *kScatterHeader = "reduction/cuda/scatter_grad.cuh";

// The type of arguments of this size in bytes.
inline jit::Type argument_type(int arg_size) {
  return arg_size == 1 ? kUint8Type : arg_size == 2 ? kUint16Type : kUint32Type;
}

inline jit::Expression reduce_expression(Storage storage, bool wide_index, bool shares, bool is_max) {
  return {kExtremumHeader, "reduction::reduce_kernel", {type_of(storage), index_type(wide_index), shares, is_max}};
}

inline jit::Expression gather_grad_expression(Storage storage, int arg_size, bool shares) {
  return {kGatherHeader, "reduction::gather_grad_kernel", {type_of(storage), argument_type(arg_size), shares}};
}

// rest: gradients that are not finite.
inline jit::Expression send_expression(Storage storage, bool wide_index, bool rest) {
  return {kScatterHeader, "reduction::send_kernel", {type_of(storage), index_type(wide_index), rest}};
}

inline jit::Expression shared_scatter_grad_expression(Storage storage, bool wide_index, bool cluster) {
  return {"reduction/cuda/shared_scatter_grad.cuh",
          "reduction::shared_scatter_grad_kernel",
          {type_of(storage), index_type(wide_index), cluster}};
}

// The kernel of a plan that reads the gradients. Other kernels prepare its input and merge its results.
inline jit::Expression expression_of(const GradientProblem& p, const GradientPlan& plan) {
  switch (plan.engine) {
    case GradientEngine::gather: return gather_grad_expression(p.storage, p.arg_bytes, p.shares);
    case GradientEngine::shared_scatter:
      return shared_scatter_grad_expression(p.storage, p.wide_index, plan.sums.blocks_log2 > 0);
    default: return send_expression(p.storage, p.wide_index, false);
  }
}

}  // namespace edgeless::cuda::reduction
