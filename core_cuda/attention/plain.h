// Attention by ops that can be differentiated any number of times, edge tensors and all: its plain form, for second
// derivatives.
#pragma once

#include "../common/second_derivatives.h"
#include "calls.h"

namespace edgeless {

// Dropout's factor of every edge, 0 or 1 / (1 - p), [E, H], as the kernels draw it. ids: of the edges, undefined
// where these are their positions.
Tensor dropout_factors(const Tensor& ids, const OptTensor& seed, double p, int64_t num_edges, int64_t heads,
                       const at::TensorOptions& options);

// What of a call is no input. Inputs stand in the order of AttentionInput, missing ones undefined.
class PlainAttention {
 public:
  explicit PlainAttention(const AttentionCall& call);

  // [Nd, H, C], in the dtype of arithmetic.
  Tensor output(const variable_list& inputs) const;

  // [E, H], by the ids of edges, after dropout.
  Tensor weights(const variable_list& inputs) const;

 private:
  struct Edges;

  std::vector<Tensor> csr_;
  OptTensor seed_;
  Score score_;
  double coefficient_, dropout_;
  at::ScalarType opmath_;
};

}  // namespace edgeless
