// Plain form of sums over relations, for second derivatives: ops that can be differentiated any number of times, with
// one product per edge.
#pragma once

#include "../common/second_derivatives.h"
#include "../spmm/edge_ends.h"
#include "calls.h"

namespace edgeless {

// typed_mm with autograd. offsets: int64.
Tensor typed_mm_op(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows);

// relational_sum in the opmath dtype. The object holds the arguments that have no gradient.
class PlainRelationalSum {
 public:
  PlainRelationalSum(at::TensorList by_dst, int64_t num_dst) : by_dst_(by_dst.vec()), num_dst_(num_dst) {}

  // edge_weight: indexed by edge id, or undefined.
  Tensor operator()(const Tensor& x, const Tensor& weight, const Tensor& edge_weight) const;

 private:
  std::vector<Tensor> by_dst_;  // the result of typed_edges and what may follow it (inputs.h)
  int64_t num_dst_;
};

}  // namespace edgeless
