// The plain form of attention, for second derivatives: a generated program, without edge tensors, where the op
// attention_program has one, and else differentiable PyTorch ops, with edge tensors.
#pragma once

#include "../common/second_derivatives.h"
#include "calls.h"

namespace edgeless {

// Dropout's factor of every edge and head, 0 or 1 / (1 - p), [E, H], as the kernels draw it. ids: the edges' original
// ids, undefined if they equal the positions.
Tensor dropout_factors(const Tensor& ids, const OptTensor& seed, double p, int64_t num_edges, int64_t heads,
                       const at::TensorOptions& options);

// A call without its inputs. These are passed to each function in the order of AttentionInput, undefined where missing.
class PlainAttention {
 public:
  explicit PlainAttention(const AttentionCall& call);

  // The output [Nd, H, C], in the opmath dtype.
  Tensor output(const variable_list& inputs) const;

  // The attention weights [E, H] after dropout, indexed by edge id.
  Tensor weights(const variable_list& inputs) const;

 private:
  struct Edges;

  // The result of the op attention_program, undefined if the op returns none.
  Tensor by_program(const variable_list& inputs, bool weights) const;

  std::vector<Tensor> csr_, csc_;
  OptTensor seed_;
  Score score_;
  double coefficient_, dropout_;
  at::ScalarType opmath_;
};

}  // namespace edgeless
