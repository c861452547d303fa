// The ops of attention over unique (source, relation) pairs as functions of a parsed call; the counterpart of
// attention/calls.h.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {

using PairChoice = std::array<bool, kPairInputs>;
using PairOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // PairResults' fields, then the sums

template <auto function>
PairOutputs pair_attention_op(const Tensor& x, const Tensor& weight, const Tensor& query, const Tensor& key,
                              const OptTensor& bias, at::TensorList walks, at::TensorList edge_ids,
                              double negative_slope, at::IntArrayRef max_degrees, bool keep_sums, const OptTensor& seed,
                              double dropout) {
  const char* op = "edgeless::pair_attention";
  return function({x, weight, query, key, bias, {op, walks}, negative_slope, max_degrees, {dropout, seed, edge_ids}},
                  keep_sums);
}

inline PairOutputs call_pair_attention(const PairCall& c, bool keep_sums) {
  static const Kernels kernels("edgeless::pair_attention", pair_attention_op<call_pair_attention>);
  return kernels(c.x, c.weight, c.query, c.key, c.bias, c.walks.all, c.dropout.edge_ids, c.negative_slope,
                 c.max_degrees, keep_sums, c.dropout.seed, c.dropout.p);
}

template <auto function>
std::vector<Tensor> pair_attention_backward_op(const Tensor& grad, const Tensor& out, const Tensor& values,
                                               const Tensor& vectors, const Tensor& queries, const Tensor& shift,
                                               const Tensor& x, const Tensor& weight, const Tensor& query,
                                               const Tensor& key, const OptTensor& bias, at::TensorList walks,
                                               at::TensorList edge_ids, double negative_slope, PairChoice needs,
                                               at::IntArrayRef max_degrees, const OptTensor& seed, double dropout) {
  const char* op = "edgeless::pair_attention_backward";
  needs[kPairBias] = needs[kPairBias] && bias;
  return function({x, weight, query, key, bias, {op, walks}, negative_slope, max_degrees, {dropout, seed, edge_ids}},
                  {out, values, vectors, queries, shift}, grad, needs);
}

// Returns an empty tensor for a gradient that is not needed.
inline std::vector<Tensor> call_pair_attention_backward(const PairCall& c, const PairResults& of, const Tensor& grad,
                                                        const PairChoice& needs) {
  static const Kernels kernels("edgeless::pair_attention_backward",
                               pair_attention_backward_op<call_pair_attention_backward>);
  return kernels(grad, of.out, of.values, of.vectors, of.queries, of.shift, c.x, c.weight, c.query, c.key, c.bias,
                 c.walks.all, c.dropout.edge_ids, c.negative_slope, needs, c.max_degrees, c.dropout.seed, c.dropout.p);
}

// Like call_pair_attention_backward(), but may overwrite the values.
inline std::vector<Tensor> call_pair_attention_backward_over(const PairCall& c, const PairResults& of,
                                                             const Tensor& grad, const PairChoice& needs) {
  static const Kernels kernels("edgeless::pair_attention_backward_over",
                               OneByOne<pair_attention_backward_op<call_pair_attention_backward_over>>::call);
  return in_a_list(kernels(grad, of.out, of.values, of.vectors, of.queries, of.shift, c.x, c.weight, c.query, c.key,
                           c.bias, c.walks.all, c.dropout.edge_ids, c.negative_slope, needs, c.max_degrees,
                           c.dropout.seed, c.dropout.p));
}

}  // namespace edgeless
