#include "plain.h"

#include <ATen/ATen.h>

#include "../spmm/edge_ends.h"

namespace edgeless {
namespace {

// Rows divided by their norms, or by `least` where the norm is smaller.
Tensor unit_rows(const Tensor& x, double least) {
  const Tensor squares = (x * x).sum(-1, /*keepdim=*/true), is_long = squares.detach().sqrt() > least;
  // The norm of a row of zeros has NaN derivatives, so short rows are replaced before the root.
  const Tensor norms = at::where(is_long, squares, at::ones_like(squares)).sqrt();
  return x / at::where(is_long, norms, at::full_like(norms, least));
}

}  // namespace

Tensor dropout_factors(const Tensor& ids, const OptTensor& seed, double p, int64_t num_edges, int64_t heads,
                       const at::TensorOptions& options) {
  // Attention over rows of a single edge, whose weight is 1 before dropout.
  const auto index = ids.defined() ? ids.options() : options.dtype(at::kLong);
  std::vector<Tensor> csr{at::arange(num_edges + 1, index), at::zeros({num_edges}, index)};
  if (ids.defined()) csr.push_back(ids);
  const auto numbers = [&](int64_t nodes) { return at::zeros({nodes, heads, 1}, options); };
  AttentionCall call = AttentionCall::plain(numbers(num_edges), numbers(1), at::ones({1, heads, 1}, options), {csr, {}},
                                            Score::gat, 1.0);
  call.seed = seed, call.dropout = p;
  return std::get<0>(call_attention(call, {})).squeeze(2);
}

PlainAttention::PlainAttention(const AttentionCall& call)
    : csr_(call.graph.csr.vec()),
      csc_(call.graph.csc.vec()),
      seed_(call.seed ? OptTensor(call.seed->clone()) : OptTensor()),
      score_(call.score),
      coefficient_(call.coefficient),
      dropout_(call.dropout),
      opmath_(call.opmath()) {}

// Per-edge tensors in CSR order: the softmax of the logits, [E, H], and the values, [E, H, C].
struct PlainAttention::Edges {
  EdgeEnds to;
  Tensor ids, softmax, values;

  Edges(const PlainAttention& of, const variable_list& inputs)
      : to(EdgeEnds::of_rows(of.csr_[0], of.csr_[1].size(0))), ids(of.csr_.size() > 2 ? of.csr_[2] : Tensor()) {
    const auto wide = [&](AttentionInput i) { return inputs[i].to(of.opmath_); };
    const bool cosine = of.score_ == Score::cosine;
    Tensor dst = as_rows(wide(kDst)), src = as_rows(wide(kSrc));
    const EdgeEnds from(of.csr_[1], src.size(0));
    if (inputs[kValue].defined()) values = from.gather(wide(kValue));
    if (cosine) values = from.gather(src), dst = unit_rows(dst, of.coefficient_), src = unit_rows(src, of.coefficient_);
    Tensor keys = from.gather(src);
    const Tensor own = to.gather(dst);
    if (!values.defined()) values = keys;
    Tensor term;
    if (inputs[kEdgeAttr].defined()) {
      const Tensor by_head = at::matmul(by_position(wide(kEdgeAttr)), wide(kEdgeProj).flatten(0, 1).t());
      term = by_head.view({-1, dst.size(1), dst.size(2)});
    }
    const auto leaky = [&](const Tensor& t) { return at::leaky_relu(term.defined() ? t + term : t, of.coefficient_); };
    Tensor logits;
    switch (of.score_) {
      case Score::gatv2: logits = (leaky(own + keys) * wide(kAtt)).sum(-1); break;
      case Score::gat: logits = leaky(own + keys).squeeze(2); break;
      case Score::cosine: logits = (own * keys).sum(-1) * wide(kAtt).squeeze(1); break;
      case Score::dot:
        if (term.defined()) keys = keys + term, values = values + term;
        logits = (own * keys).sum(-1) * of.coefficient_;
    }
    softmax = to.softmax(logits);
  }

  // Conversions between arrays indexed by edge id and arrays in CSR order.
  Tensor by_position(const Tensor& by_id) const { return ids.defined() ? by_id.index_select(0, ids) : by_id; }
  Tensor by_id(const Tensor& by_position) const {
    return ids.defined() ? by_position.index_select(0, at::argsort(ids)) : by_position;
  }

  void drop(const OptTensor& seed, double p) {
    if (p > 0) softmax = softmax * dropout_factors(ids, seed, p, to.num_edges(), softmax.size(1), softmax.options());
  }
};

Tensor PlainAttention::by_program(const variable_list& inputs, bool weights) const {
  using Inputs = c10::List<OptTensor>;
  using Op = std::vector<Tensor>(Inputs, at::TensorList, at::TensorList, const OptTensor&, c10::string_view, double,
                                 double, bool);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("edgeless::attention_program", "").typed<Op>();
  Inputs given;
  for (const Tensor& t : inputs) given.push_back(t.defined() ? OptTensor(t) : OptTensor());
  const auto found = op.call(given, csr_, csc_, seed_, name_of(score_), coefficient_, dropout_, weights);
  return found.empty() ? Tensor() : found[0];
}

Tensor PlainAttention::output(const variable_list& inputs) const {
  if (const Tensor found = by_program(inputs, false); found.defined()) return found;
  Edges edges(*this, inputs);
  edges.drop(seed_, dropout_);
  Tensor weights = edges.softmax;
  if (inputs[kEdgeScale].defined()) weights = weights * edges.by_position(inputs[kEdgeScale].to(opmath_));
  return edges.to.sum(weights.unsqueeze(2) * edges.values);
}

Tensor PlainAttention::weights(const variable_list& inputs) const {
  if (const Tensor found = by_program(inputs, true); found.defined()) return found;
  Edges edges(*this, inputs);
  edges.drop(seed_, dropout_);
  return edges.by_id(edges.softmax);
}

}  // namespace edgeless
