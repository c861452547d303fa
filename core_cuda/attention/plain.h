// The plain form of attention, for second derivatives: a program, without edge tensors, where that is of use, and else
// differentiable PyTorch ops with them.
#pragma once

#include "../common/second_derivatives.h"
#include "calls.h"

namespace edgeless {

// Dropout's factor of every edge and head, 0 or 1 / (1 - p), [E, H], as the kernels draw it. ids: the edges' original
// ids, undefined if they equal the positions.
Tensor dropout_factors(const Tensor& ids, const OptTensor& seed, double p, int64_t num_edges, int64_t heads,
                       const at::TensorOptions& options);

// A call without its inputs, which are passed in the order of AttentionInput, undefined where missing.
class PlainAttention {
 public:
  explicit PlainAttention(const AttentionCall& call);

  // The output [Nd, H, C], in the opmath dtype.
  Tensor output(const variable_list& inputs) const;

  // The attention weights [E, H] after dropout, indexed by edge id.
  Tensor weights(const variable_list& inputs) const;

 private:
  struct Edges;

  // The result as the op attention_program computes it, undefined if it does not.
  Tensor by_program(const variable_list& inputs, bool weights) const;

  std::vector<Tensor> csr_, csc_;
  OptTensor seed_;
  Score score_;
  double coefficient_, dropout_;
  at::ScalarType opmath_;
};

}  // namespace edgeless
