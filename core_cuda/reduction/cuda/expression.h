// The kernels of neighbor_reduce: header and template arguments, for launches and printed plans. No CUDA and no torch.
#pragma once

#include "../../common/kernel_types.h"
#include "args.h"
#include "plan.h"

namespace edgeless::cuda::reduction {

inline constexpr const char *kExtremumHeader = "reduction/cuda/extremum.cuh",
                            *kGatherHeader = "reduction/cuda/gather_grad.cuh",
                            *kMaskedHeader = "reduction/cuda/masked_gather_grad.cuh",
                            *kSortedHeader = "reduction/cuda/sorted_grad.cuh",
                            *kScatterHeader = "reduction/cuda/scatter_grad.cuh";

// The type of arguments of so many bytes.
inline jit::Type argument_type(int arg_size) {
  return arg_size == 1 ? kUint8Type : arg_size == 2 ? kUint16Type : kUint32Type;
}

inline jit::Expression reduce_expression(Storage storage, bool wide_index, bool shares, bool is_max) {
  return {kExtremumHeader, "reduction::reduce_kernel", {type_of(storage), index_type(wide_index), shares, is_max}};
}

inline jit::Expression gather_grad_expression(Storage storage, int arg_size, bool shares) {
  return {kGatherHeader, "reduction::gather_grad_kernel", {type_of(storage), argument_type(arg_size), shares}};
}

inline jit::Expression masked_gather_grad_expression(int arg_size) {
  return {kMaskedHeader, "reduction::masked_gather_grad_kernel", {argument_type(arg_size)}};
}

// An edge has columns / degree items on average; lanes load two at a time where that fills half a sub-warp or more.
inline jit::Expression sorted_grad_expression(Storage storage, int team_log2, int64_t num_edges, int64_t num_rows) {
  const bool many = num_edges <= 2 * kSortPer * num_rows;
  return {kSortedHeader, "reduction::sorted_grad_kernel", {type_of(storage), 1 << team_log2, many ? 2 : 1}};
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

// The kernel that reads the gradients of a plan, beside those that prepare and merge.
inline jit::Expression expression_of(const GradientProblem& p, const GradientPlan& plan) {
  switch (plan.engine) {
    case GradientEngine::gather: return gather_grad_expression(p.storage, p.arg_bytes, p.shares);
    case GradientEngine::masked_gather: return masked_gather_grad_expression(p.arg_bytes);
    case GradientEngine::sorted: {
      const int64_t result_bytes = p.num_columns * p.width * size_of(p.storage);
      const int team_log2 = sort_columns(p.num_rows, p.width, result_bytes).team_log2;
      return sorted_grad_expression(p.storage, team_log2, p.num_edges, p.num_rows);
    }
    case GradientEngine::shared_scatter:
      return shared_scatter_grad_expression(p.storage, p.wide_index, plan.sums.blocks_log2 > 0);
    default: return send_expression(p.storage, p.wide_index, false);
  }
}

}  // namespace edgeless::cuda::reduction
