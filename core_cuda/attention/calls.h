// The attention ops as functions of a parsed call. Their long signatures are written only here: `*_op<function>` is
// registered for a device or for autograd and parses the arguments for `function`; `call_*` passes a call to the op
// below autograd.
#pragma once

#include <array>

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {

// Order of the inputs in lists of gradients and in AttentionGrads::needs.
enum AttentionInput : size_t { kDst, kSrc, kValue, kAtt, kEdgeAttr, kEdgeProj, kEdgeScale, kAttentionInputs };
using AttentionChoice = std::array<bool, kAttentionInputs>;

// Inputs of a backward besides the call: the output and its gradient, or the gradient of returned weights.
struct AttentionGrads {
  OptTensor grad_out, grad_weights, out;
  Tensor softmax_stats;
  AttentionChoice needs{};
  bool dropped_weights = false, side_by_side = false;
};

// Raises unless exactly one of the two gradients is given, with the right shape, dtype and device.
inline void check_grads(const char* op, const AttentionCall& in, const AttentionGrads& g) {
  check_stats(op, in, g.softmax_stats);
  TORCH_CHECK_VALUE(g.grad_out.has_value() != g.grad_weights.has_value(), op, ": give either grad_out or grad_weights");
  if (g.grad_out) {
    TORCH_CHECK_VALUE(g.out.has_value(), op, ": grad_out needs out");
    check_output(op, in, *g.grad_out, *g.out);
  } else {
    check_shape(op, "grad_weights", *g.grad_weights, {in.num_edges(), in.heads()});
    check_dtype(op, "grad_weights", *g.grad_weights, in.opmath());
    check_device(op, "grad_weights", *g.grad_weights, in.device());
  }
}

template <auto function>
std::tuple<Tensor, Tensor> attention_op(const Tensor& dst, const Tensor& src, const OptTensor& value,
                                        const OptTensor& att, const OptTensor& edge_attr, const OptTensor& edge_proj,
                                        const OptTensor& edge_scale, at::TensorList csr, at::TensorList csc,
                                        const OptTensor& seed, c10::string_view score, double coefficient,
                                        double dropout, Optional<at::ScalarType> out_dtype, at::IntArrayRef max_degrees,
                                        bool donated) {
  const Score parsed = parse_score("edgeless::attention", score);
  return function({dst,
                   src,
                   value,
                   att,
                   edge_attr,
                   edge_proj,
                   edge_scale,
                   {csr, csc, max_degrees},
                   seed,
                   parsed,
                   coefficient,
                   dropout,
                   donated},
                  out_dtype);
}

inline std::tuple<Tensor, Tensor> call_attention(const AttentionCall& c, Optional<at::ScalarType> out_dtype) {
  static const Kernels kernels("edgeless::attention", attention_op<call_attention>);
  return kernels(c.dst, c.src, c.value, c.att, c.edge_attr, c.edge_proj, c.edge_scale, c.graph.csr, c.graph.csc, c.seed,
                 name_of(c.score), c.coefficient, c.dropout, out_dtype, c.graph.max_degrees, c.donated);
}

template <auto function>
Tensor attention_weights_op(const Tensor& softmax_stats, const Tensor& dst, const Tensor& src, const OptTensor& att,
                            const OptTensor& edge_attr, const OptTensor& edge_proj, at::TensorList csr,
                            at::TensorList csc, const OptTensor& seed, c10::string_view score, double coefficient,
                            double dropout) {
  const Score parsed = parse_score("edgeless::attention_weights", score);
  return function({dst, src, {}, att, edge_attr, edge_proj, {}, {csr, csc}, seed, parsed, coefficient, dropout},
                  softmax_stats);
}

inline Tensor call_attention_weights(const AttentionCall& c, const Tensor& softmax_stats) {
  static const Kernels kernels("edgeless::attention_weights", attention_weights_op<call_attention_weights>);
  return kernels(softmax_stats, c.dst, c.src, c.att, c.edge_attr, c.edge_proj, c.graph.csr, c.graph.csc, c.seed,
                 name_of(c.score), c.coefficient, c.dropout);
}

template <auto function>
std::vector<Tensor> attention_backward_op(const OptTensor& grad_out, const OptTensor& grad_weights,
                                          const OptTensor& out, const Tensor& softmax_stats, const Tensor& dst,
                                          const Tensor& src, const OptTensor& value, const OptTensor& att,
                                          const OptTensor& edge_attr, const OptTensor& edge_proj,
                                          const OptTensor& edge_scale, at::TensorList csr, at::TensorList csc,
                                          const OptTensor& seed, c10::string_view score, double coefficient,
                                          double dropout, bool dropped_weights, AttentionChoice needs,
                                          bool side_by_side, at::IntArrayRef max_degrees) {
  const Score parsed = parse_score("edgeless::attention_backward", score);
  return function({dst,
                   src,
                   value,
                   att,
                   edge_attr,
                   edge_proj,
                   edge_scale,
                   {csr, csc, max_degrees},
                   seed,
                   parsed,
                   coefficient,
                   dropout},
                  {grad_out, grad_weights, out, softmax_stats, needs, dropped_weights, side_by_side});
}

inline std::vector<Tensor> call_attention_backward(const AttentionCall& c, const AttentionGrads& g) {
  static const Kernels kernels("edgeless::attention_backward", attention_backward_op<call_attention_backward>);
  return kernels(g.grad_out, g.grad_weights, g.out, g.softmax_stats, c.dst, c.src, c.value, c.att, c.edge_attr,
                 c.edge_proj, c.edge_scale, c.graph.csr, c.graph.csc, c.seed, name_of(c.score), c.coefficient,
                 c.dropout, g.dropped_weights, g.needs, g.side_by_side, c.graph.max_degrees);
}

template <auto function>
Tensor attention_backward_into_op(at::TensorList into, const Tensor& grad_out, const Tensor& out,
                                  const Tensor& softmax_stats, const Tensor& dst, const Tensor& src,
                                  const OptTensor& value, const OptTensor& att, at::TensorList csr, at::TensorList csc,
                                  const OptTensor& seed, c10::string_view score, double coefficient, double dropout,
                                  bool att_grad, at::IntArrayRef max_degrees) {
  const Score parsed = parse_score("edgeless::attention_backward_into", score);
  const AttentionChoice needs{true, true, value.has_value(), att_grad && att.has_value()};
  return function({dst, src, value, att, {}, {}, {}, {csr, csc, max_degrees}, seed, parsed, coefficient, dropout},
                  {grad_out, {}, out, softmax_stats, needs}, into);
}

inline Tensor call_attention_backward_into(const AttentionCall& c, const AttentionGrads& g, at::TensorList into) {
  static const Kernels kernels("edgeless::attention_backward_into",
                               attention_backward_into_op<call_attention_backward_into>);
  return kernels(into, *g.grad_out, *g.out, g.softmax_stats, c.dst, c.src, c.value, c.att, c.graph.csr, c.graph.csc,
                 c.seed, name_of(c.score), c.coefficient, c.dropout, g.needs[kAtt], c.graph.max_degrees);
}

inline Tensor call_softmax_sum(const Tensor& logits, const Tensor& value, const GraphArrays& graph) {
  using Signature = Tensor(const Tensor&, const Tensor&, at::TensorList, at::IntArrayRef);
  static const Kernels kernels("edgeless::softmax_sum", static_cast<Signature*>(nullptr));
  return kernels(logits, value, graph.csr, graph.max_degrees);
}

// softmax_sum as a call of gat in which every node has the same `number`, [1, 1, 1]. The call does not include the
// logits.
inline AttentionCall softmax_sum_call(const Tensor& logits, const Tensor& value, at::TensorList csr,
                                      at::IntArrayRef max_degrees, const Tensor& number) {
  const char* op = "edgeless::softmax_sum";
  check_dim(op, "value", value, 3, "[Ns, H, C]");
  TORCH_CHECK_VALUE(csr.size() == 2 && csr[0].dim() == 1 && csr[0].size(0) > 0, op,
                    ": csr must hold [indptr, indices], got ", csr.size(), " tensors");
  const int64_t heads = value.size(1);
  const auto numbers = [&](int64_t nodes) { return number.expand({nodes, heads, 1}); };
  AttentionCall call = AttentionCall::plain(numbers(csr[0].size(0) - 1), numbers(value.size(0)), value,
                                            {csr, {}, max_degrees}, Score::gat, 1.0);
  check_call(op, call);
  check_shape(op, "logits", logits, {call.num_edges(), heads});
  check_dtype(op, "logits", logits, call.opmath());
  check_device(op, "logits", logits, call.device());
  return call;
}

// gat's values per node may have the shape [N, H] in the forward; the backward uses [N, H, 1].
inline Tensor as_rows(const Tensor& t) { return t.dim() == 2 ? t.unsqueeze(2) : t; }
inline Tensor as_given(const Tensor& grad, const Tensor& given) { return given.dim() == 2 ? grad.squeeze(2) : grad; }

// Saves the options of a call that are neither tensors nor the graph, for the backward.
inline void save_options(AutogradContext* ctx, const AttentionCall& call) {
  ctx->saved_data["score"] = static_cast<int64_t>(call.score);
  ctx->saved_data["coefficient"] = call.coefficient;
  ctx->saved_data["dropout"] = call.dropout;
}

inline Score saved_score(const AutogradContext* ctx) { return static_cast<Score>(ctx->saved_data.at("score").toInt()); }

// Rebuilds the call from saved options, the seven inputs in the order of AttentionInput, the graph and the seed.
inline AttentionCall saved_call(const AutogradContext* ctx, const std::array<OptTensor, kAttentionInputs>& inputs,
                                const GraphArrays& graph, const OptTensor& seed) {
  return {*inputs[kDst],
          *inputs[kSrc],
          inputs[kValue],
          inputs[kAtt],
          inputs[kEdgeAttr],
          inputs[kEdgeProj],
          inputs[kEdgeScale],
          graph,
          seed,
          saved_score(ctx),
          ctx->saved_data.at("coefficient").toDouble(),
          ctx->saved_data.at("dropout").toDouble()};
}

}  // namespace edgeless
