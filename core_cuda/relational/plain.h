// Sums over relations by ops that can be differentiated any number of times, an edge's product and all: their plain
// form, for second derivatives.
#pragma once

#include "../common/edge_ends.h"
#include "../common/second_derivatives.h"
#include "calls.h"

namespace edgeless {

// typed_mm with its autograd. offsets: int64.
Tensor typed_mm_op(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows);

// relational_sum, in the dtype of arithmetic; of its options what is no tensor with a gradient is kept.
class PlainRelationalSum {
 public:
  PlainRelationalSum(at::TensorList by_dst, int64_t num_dst) : by_dst_(by_dst.vec()), num_dst_(num_dst) {}

  // edge_weight: by the ids of edges, undefined where there is none.
  Tensor operator()(const Tensor& x, const Tensor& weight, const Tensor& edge_weight) const;

 private:
  std::vector<Tensor> by_dst_;  // what typed_edges gives, and what may stand behind that (inputs.h)
  int64_t num_dst_;
};

}  // namespace edgeless
