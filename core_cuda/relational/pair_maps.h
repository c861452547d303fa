// Keys and values per unique (source, type) ("pair"), from which the attention of an HGT layer gathers: the source's
// row of k times the type's matrix and scale, and its row of v times the type's other matrix. They are composed of sums
// over relations, on graphs whose edges are the pairs; on CUDA pair_maps_cuda.cpp has a faster form for the calls that
// it supports.
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
  at::TensorList csr;  // edges from pairs to destinations, without ids
  double coefficient;  // factor of the logits
  at::IntArrayRef max_degrees;

  int64_t heads() const { return maps.k_weight.size(1); }
};

// Raises unless everything fits.
void check_pair_dot_attention(const char* op, const PairDotCall& in);

Tensor pair_dot_attention_of_parts(const PairDotCall& in);

// Adapters between the ops' signatures and functions of a call.
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

// The same op, but it may overwrite grad_keys and grad_values.
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
