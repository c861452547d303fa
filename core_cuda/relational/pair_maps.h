// Keys and values of the pairs of a source and a type, of which an HGT layer's attention makes its own: the source's
// row of k times the type's matrix and number, and its row of v times the type's other matrix. Made of sums over
// relations, of graphs whose edges are the pairs; on CUDA pair_maps_cuda.cpp comes before these parts.
#pragma once

#include <array>

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {

// The order of the gradients and of `needs`.
enum PairMapInput : size_t { kPairKeys, kPairValues, kKeyWeight, kValueWeight, kKeyScale, kPairMapInputs };
using PairMapChoice = std::array<bool, kPairMapInputs>;

struct PairMapsCall {
  const Tensor &k, &v, &k_weight, &v_weight, &k_scale;
  at::TensorList by_dst, by_src;

  int64_t pairs() const { return by_dst[3].size(0); }
};

// Raises unless everything fits.
void check_pair_maps(const char* op, const PairMapsCall& in);
void check_pair_map_grads(const char* op, const PairMapsCall& in, const Tensor& grad_keys, const Tensor& grad_values);

std::tuple<Tensor, Tensor> pair_maps_of_parts(const PairMapsCall& in);
std::vector<Tensor> pair_maps_backward_of_parts(const Tensor& grad_keys, const Tensor& grad_values,
                                                const PairMapsCall& in, const PairMapChoice& needs);

// The attention of destinations q [Nd, H M] over the pairs' keys and values, without gradients.
struct PairDotCall {
  const Tensor& q;
  PairMapsCall maps;
  at::TensorList csr;  // of the edges from pairs to destinations, without ids
  double coefficient;  // of the logits
  at::IntArrayRef max_degrees;

  int64_t heads() const { return maps.k_weight.size(1); }
};

// Raises unless everything fits.
void check_pair_dot_attention(const char* op, const PairDotCall& in);

Tensor pair_dot_attention_of_parts(const PairDotCall& in);

// From the signatures of the ops to functions of a call, and back.
template <auto function>
std::tuple<Tensor, Tensor> pair_maps_op(const Tensor& k, const Tensor& v, const Tensor& k_weight,
                                        const Tensor& v_weight, const Tensor& k_scale, at::TensorList by_dst,
                                        at::TensorList by_src, bool joined) {
  return function({k, v, k_weight, v_weight, k_scale, by_dst, by_src}, joined);
}

inline std::tuple<Tensor, Tensor> call_pair_maps(const PairMapsCall& in, bool joined) {
  static const Kernels kernels("edgeless::pair_maps", pair_maps_op<call_pair_maps>);
  return kernels(in.k, in.v, in.k_weight, in.v_weight, in.k_scale, in.by_dst, in.by_src, joined);
}

template <auto function>
std::vector<Tensor> pair_maps_backward_op(const Tensor& grad_keys, const Tensor& grad_values, const Tensor& k,
                                          const Tensor& v, const Tensor& k_weight, const Tensor& v_weight,
                                          const Tensor& k_scale, at::TensorList by_dst, at::TensorList by_src,
                                          PairMapChoice needs) {
  return function(grad_keys, grad_values, {k, v, k_weight, v_weight, k_scale, by_dst, by_src}, needs);
}

inline std::vector<Tensor> call_pair_maps_backward(const Tensor& grad_keys, const Tensor& grad_values,
                                                   const PairMapsCall& in, const PairMapChoice& needs) {
  static const Kernels kernels("edgeless::pair_maps_backward", pair_maps_backward_op<call_pair_maps_backward>);
  return kernels(grad_keys, grad_values, in.k, in.v, in.k_weight, in.v_weight, in.k_scale, in.by_dst, in.by_src, needs);
}

// The same where gradients of pairs may be written over.
inline std::vector<Tensor> call_pair_maps_backward_over(const Tensor& grad_keys, const Tensor& grad_values,
                                                        const PairMapsCall& in, const PairMapChoice& needs) {
  static const Kernels kernels("edgeless::pair_maps_backward_over",
                               OneByOne<pair_maps_backward_op<call_pair_maps_backward_over>>::call);
  return in_a_list(
      kernels(grad_keys, grad_values, in.k, in.v, in.k_weight, in.v_weight, in.k_scale, in.by_dst, in.by_src, needs));
}

template <auto function>
Tensor pair_dot_attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_weight,
                             const Tensor& v_weight, const Tensor& k_scale, at::TensorList by_dst, at::TensorList csr,
                             double coefficient, at::IntArrayRef max_degrees) {
  return function({q, {k, v, k_weight, v_weight, k_scale, by_dst, {}}, csr, coefficient, max_degrees});
}

}  // namespace edgeless
