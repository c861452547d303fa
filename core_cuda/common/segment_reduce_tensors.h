// Conversions from tensors to the inputs of segment reductions (segment_reduce.h).
#pragma once

#include <ATen/ATen.h>

#include "launch.h"
#include "segment_reduce.h"
#include "storage_of.h"

namespace edgeless::cuda {

// Converts a tensor [N, H, D].
inline ReduceRows reduce_rows(const at::Tensor& t) {
  ReduceRows r;
  r.base = static_cast<const char*>(t.data_ptr());
  r.row = t.size(0) > 1 ? static_cast<uint32_t>(t.stride(0) * t.element_size()) : 0;
  r.head = t.size(1) > 1 ? t.stride(1) * t.element_size() : 0;
  return r;
}

inline ReduceProblem reduce_problem(const CompressedGraph& graph, const at::Tensor& gathered, int64_t vectors,
                                    int64_t max_degree = -1) {
  ReduceProblem p;
  p.num_rows = graph.num_rows, p.num_edges = graph.num_edges, p.num_gathered = gathered.size(0);
  p.max_degree = max_degree;
  p.vectors = static_cast<int>(vectors);
  p.multiprocessors = device_attribute(jit::Attribute::multiprocessors, gathered.get_device());
  p.l2_bytes = device_attribute(jit::Attribute::l2_bytes, gathered.get_device());
  return p;
}

// Limits the fix-up workspace (`carry`) to an eighth of the result, or 1 MiB if that is more.
inline void budget_carry(ReduceProblem& problem, int64_t carry_bytes, const at::Tensor& result) {
  problem.carry_bytes = carry_bytes;
  problem.carry_budget = std::max<int64_t>(1 << 20, result.nbytes() / 8);
}

// Allocates the fix-up workspace for the segments of hubs; undefined if the plan splits no row.
template <class Args>
at::Tensor take_carry(const ReduceProblem& problem, const at::Tensor& like, Args& args) {
  if (!args.plan.hubs) return {};
  at::Tensor carry = at::empty({2 * args.plan.slots * problem.carry_bytes}, like.options().dtype(at::kByte));
  args.carry = static_cast<char*>(carry.data_ptr());
  return carry;
}

}  // namespace edgeless::cuda
