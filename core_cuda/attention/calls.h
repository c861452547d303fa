// The attention ops below autograd, for the functions of autograd that are made of them.
#pragma once

#include <array>

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {

constexpr size_t kAttentionInputs = 7;  // dst, src, value, att, edge_attr, edge_proj, edge_scale
enum AttentionInput : size_t { kDst, kSrc, kValue, kAtt };
using AttentionChoice = std::array<bool, kAttentionInputs>;

inline std::tuple<Tensor, Tensor> call_attention(const Tensor& dst, const Tensor& src, const OptTensor& value,
                                                 const OptTensor& att, const OptTensor& edge_attr,
                                                 const OptTensor& edge_proj, const OptTensor& edge_scale,
                                                 at::TensorList csr, at::TensorList csc, const OptTensor& seed,
                                                 c10::string_view score, double coefficient, double dropout,
                                                 Optional<at::ScalarType> out_dtype, at::IntArrayRef longest) {
  static const Kernels kernels("edgeless::attention", call_attention);
  return kernels(dst, src, value, att, edge_attr, edge_proj, edge_scale, csr, csc, seed, score, coefficient, dropout,
                 out_dtype, longest);
}

inline std::vector<Tensor> call_attention_backward(const OptTensor& grad_out, const OptTensor& grad_weights,
                                                   const OptTensor& out, const Tensor& softmax_stats, const Tensor& dst,
                                                   const Tensor& src, const OptTensor& value, const OptTensor& att,
                                                   const OptTensor& edge_attr, const OptTensor& edge_proj,
                                                   const OptTensor& edge_scale, at::TensorList csr, at::TensorList csc,
                                                   const OptTensor& seed, c10::string_view score, double coefficient,
                                                   double dropout, bool dropped_weights, AttentionChoice needs,
                                                   bool side_by_side, at::IntArrayRef longest) {
  static const Kernels kernels("edgeless::attention_backward", call_attention_backward);
  return kernels(grad_out, grad_weights, out, softmax_stats, dst, src, value, att, edge_attr, edge_proj, edge_scale,
                 csr, csc, seed, score, coefficient, dropout, dropped_weights, needs, side_by_side, longest);
}

inline Tensor call_attention_backward_into(at::TensorList into, const Tensor& grad_out, const Tensor& out,
                                           const Tensor& softmax_stats, const Tensor& dst, const Tensor& src,
                                           const OptTensor& value, const OptTensor& att, at::TensorList csr,
                                           at::TensorList csc, const OptTensor& seed, c10::string_view score,
                                           double coefficient, double dropout, bool att_grad, at::IntArrayRef longest) {
  static const Kernels kernels("edgeless::attention_backward_into", call_attention_backward_into);
  return kernels(into, grad_out, out, softmax_stats, dst, src, value, att, csr, csc, seed, score, coefficient, dropout,
                 att_grad, longest);
}

// The backward takes gat's numbers of nodes with the dimension that the forward does without.
inline Tensor as_rows(const Tensor& t) { return t.dim() == 2 ? t.unsqueeze(2) : t; }
inline Tensor as_given(const Tensor& grad, const Tensor& given) { return given.dim() == 2 ? grad.squeeze(2) : grad; }

// The arguments of an attention op that have no gradient.
struct AttentionOptions {
  at::TensorList csr, csc;
  const OptTensor& seed;
  c10::string_view score;
  double coefficient, dropout;
  at::IntArrayRef longest;

  void save(AutogradContext* ctx) const {
    ctx->saved_data["score"] = std::string(score.data(), score.size());
    ctx->saved_data["coefficient"] = coefficient;
    ctx->saved_data["dropout"] = dropout;
    ctx->saved_data["longest"] = longest.vec();
  }
};

struct SavedAttentionOptions {
  std::string score;
  double coefficient, dropout;
  std::vector<int64_t> longest;

  explicit SavedAttentionOptions(const AutogradContext* ctx)
      : score(ctx->saved_data.at("score").toStringRef()),
        coefficient(ctx->saved_data.at("coefficient").toDouble()),
        dropout(ctx->saved_data.at("dropout").toDouble()),
        longest(ctx->saved_data.at("longest").toIntVector()) {}
};

}  // namespace edgeless
