// The attention ops on CUDA: checks, allocation and the order of the passes. The kernels and their arguments are in
// cuda/. Nothing here synchronizes with the device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "../common/packed.h"
#include "../common/thresholds.h"
#include "call_cuda.h"
#include "edge_terms_cuda.h"

namespace edgeless::cuda {
namespace {

template <class A>
void forward(const AttentionCall& given, Tensor& out, Tensor& softmax_stats) {
  const EdgeOrder order(given, true);
  const Optional<AttentionCall> drawn = with_drawn<A>(given, order);
  const AttentionCall& in = drawn ? *drawn : given;
  Call<A> call(in, runs_on_blocks(in, false));
  call.args.logsumexp = softmax_stats.data_ptr<A>();
  const bool dot_edges = in.edge_attr && in.score == Score::dot;
  Tensor term, result = out;
  if (in.edge_attr && in.score != Score::gatv2) {
    const Tensor projected = dot_edges ? to_edge_space(in.dst, *in.edge_proj) : Tensor();
    term = logit_term(call, in, order.by_position, projected);
    call.args.logit_term = call.keep(term);
  }
  if (dot_edges) {
    call.args.logits_out = call.keep(term);
    result = call.empty(out.sizes());
  }
  call.args.out = call.out_rows(result);
  call.run(Pass::forward, order.csr(), in.num_src());
  if (!dot_edges) return;
  out.copy_(result + from_edge_space(aggregate_edges<A>(in, order, term, {}), *in.edge_proj));
}

// The attention weights [E, H] with the dropout of `in`, which must have no edge_scale.
template <class A>
Tensor weights(const AttentionCall& in, const Tensor& softmax_stats) {
  Call<A> call(in);
  Tensor term, result = call.empty({in.num_edges(), in.heads()});
  if (in.edge_attr && in.score != Score::gatv2) {
    const bool dot = in.score == Score::dot;
    term = logit_term(call, in, false, dot ? to_edge_space(in.dst, *in.edge_proj) : Tensor());
    call.args.logit_term = call.keep(term);
  }
  call.args.logsumexp = call.keep(softmax_stats.contiguous());
  call.args.weights_out = result.template data_ptr<A>();
  if (!result.numel()) return result;
  const bool drops = std::exchange(call.args.has_dropout, false);  // dropout applies after the softmax
  call.run(Pass::by_dst, in.graph.csr, in.num_src());
  call.args.has_dropout = drops;
  normalize_weights(call.args, call.problem.wide_index, call.queue());
  return result;
}

// If the inputs are column ranges of one tensor, allocates their gradients as column ranges of one tensor in the same
// order: the backward of the linear maps that computed the inputs is then one GEMM instead of several. `which`: the
// inputs, among kDst, kSrc and kValue.
void put_side_by_side(const AttentionCall& in, std::vector<int> which, std::vector<Tensor>& grads) {
  const auto input = [&](int i) -> const Tensor& { return i == kDst ? in.dst : i == kSrc ? in.src : *in.value; };
  const size_t parts = which.size();
  std::vector<Tensor> inputs;
  for (const int i : which) inputs.push_back(input(i));
  const auto given = Packed::of(inputs);
  const int64_t width = in.heads() * in.dim();
  if (!given || !in.dst.storage().is_alias_of(inputs[0].storage())) return;
  for (const Tensor& t : inputs) {
    if (t.sizes() != in.dst.sizes()) return;
  }
  // Keeps the inputs' stride if they have a fourth part, whose gradient may later be stored next to these.
  const int64_t columns = width * (given->stride == 4 * width && parts == 3 ? 4 : parts);
  const Packed all(at::empty({in.num_dst(), columns}, in.dst.options()), std::vector<int64_t>(parts, width));
  std::vector<size_t> order(parts);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return given->begin[a] < given->begin[b]; });
  for (size_t k = 0; k < parts; ++k) grads[which[order[k]]] = all.part(k).view(in.dst.sizes());
}

// in_place: the gradients of src and value may overwrite the rows of src and value.
template <class A>
void backward(const AttentionCall& given, const AttentionGrads& found, std::vector<Tensor>& grads, bool in_place) {
  const auto& [grad_out, grad_weights, out, softmax_stats, needs, dropped_weights, may_stand_together] = found;
  EdgeOrder order(given, grad_out.has_value());
  const Optional<AttentionCall> drawn = with_drawn<A>(given, order);
  const AttentionCall& in = drawn ? *drawn : given;
  bool side_by_side = may_stand_together;
  const bool by_blocks = grad_out && runs_on_blocks(in, true);
  Call<A> call(in, by_blocks);
  auto& args = call.args;
  const int64_t edges = in.num_edges(), heads = in.heads();
  const bool dot_edges = in.edge_attr && in.score == Score::dot;
  const bool edge_grads = in.edge_attr && (needs[kEdgeAttr] || needs[kEdgeProj] || (needs[kAtt] && in.edge_attr) ||
                                           (dot_edges && needs[kDst]));
  call.args.logsumexp = call.keep(softmax_stats.contiguous());
  // Pairs (Args::stats) save the source pass a memory sector per edge. With float rows of other scores than gatv2 there
  // is no memory for pairs.
  const bool pairs = !by_blocks && (in.score == Score::gatv2 || in.rows() == at::kHalf || in.rows() == at::kBFloat16);
  const Tensor stats = call.empty({in.num_dst(), heads, pairs ? 2 : 1});
  (pairs ? args.stats : args.delta) = stats.template data_ptr<A>();
  if (in.rows() == at::kFloat) {
    const int64_t numbers = 2 * in.num_dst() * heads;
    args.exact = call.keep(call.empty({numbers + 1}));
    if (in_place) {
      args.some_large = reinterpret_cast<int*>(args.exact + numbers);
      jit::clear(call.queue(), args.some_large, sizeof(int));
    }
  }
  Tensor edge_weights;
  if (grad_out) {
    call.set_grad_out(*grad_out, *out);
  } else {
    edge_weights = grad_weights->contiguous();
    const Tensor softmax = weights<A>(in, softmax_stats);
    const Tensor delta = call.keep_tensor(call.empty({in.num_dst(), heads}));
    row_dot<A>(compressed_graph(in.graph.csr), call.problem.wide_index, softmax.data_ptr<A>(),
               edge_weights.data_ptr<A>(), int(heads), delta.template data_ptr<A>(), call.queue());
    args.grad_weights = edge_weights.data_ptr<A>();
    args.delta_given = delta.template data_ptr<A>();
  }

  // destination pass
  Tensor ds, weights_out, projected_dst, projected_grad;
  if (dot_edges) {
    projected_dst = to_edge_space(in.dst, *in.edge_proj);
    if (grad_out) projected_grad = to_edge_space(*grad_out, *in.edge_proj);
    const auto terms = products_of_edges(call, in, order.by_position, projected_dst, in.coefficient, projected_grad);
    args.logit_term = call.keep(terms[0]);
    if (grad_out) args.value_term = call.keep(terms[1]);
  } else if (in.edge_attr && in.score == Score::gat) {
    args.logit_term = call.keep(logit_term(call, in, order.by_position, {}));
  }
  if (edge_grads) {
    ds = call.empty({edges, heads});
    args.ds_out = call.keep(ds);
    args.ds_in_order = in.score == Score::gatv2 && makes_all_by_products<A>(in, needs);
    if (dot_edges && grad_out && (needs[kEdgeAttr] || needs[kEdgeProj])) {
      weights_out = call.empty({edges, heads});
      args.weights_out = call.keep(weights_out), args.weights_scaled = true;
    }
  }
  if (needs[kEdgeScale] && grad_out) args.grad_scale = grads[kEdgeScale].template data_ptr<A>();
  std::vector<int> sources{kSrc};
  if (in.value) sources.push_back(kValue);
  side_by_side &= std::all_of(sources.begin(), sources.end(), [&](int i) { return needs[i]; });
  // With many rows, only gradients of the same pass share a tensor, so that none is allocated before its pass.
  const bool few = in.num_dst() < kLaunchBoundRows;
  if (side_by_side && few && needs[kDst]) {
    std::vector<int> all = sources;
    all.push_back(kDst);
    put_side_by_side(in, all, grads);
  }
  Tensor grad_dst = grads[kDst];
  if (needs[kDst]) {
    if (dot_edges) grad_dst = call.empty(in.dst.sizes());
    args.grad_dst = call.out_rows(grad_dst);
  }
  call.run(Pass::by_dst, order.csr(), in.num_src(), needs[kAtt]);
  args.ds_out = args.weights_out = args.grad_scale = nullptr;

  // source pass; the gradient of gatv2's att needs it as well, that of the cosine's factor is already complete
  const bool att_by_src = needs[kAtt] && in.score != Score::cosine;
  if (needs[kSrc] || needs[kValue] || att_by_src) {
    TORCH_CHECK_VALUE(!in.graph.csc.empty(),
                      "edgeless::attention_backward: csc is needed for the gradients of source tensors and of att");
    // Allocates these gradients only now, when the temporary memory of the destination pass is free.
    if (side_by_side && !few && sources.size() > 1) put_side_by_side(in, sources, grads);
    const auto make = [&](int which, const Tensor& like) {
      if (!grads[which].numel()) grads[which] = at::empty(like.sizes(), like.options());
      return call.out_rows(grads[which]);
    };
    if (needs[kSrc]) args.grad_src = make(kSrc, in.src);
    if (needs[kValue]) args.grad_value = make(kValue, *in.value);
    args.delta_given = nullptr;
    call.run(Pass::by_src, order.csc(), in.num_dst(), att_by_src);
  }

  Tensor att_grad;
  if (needs[kAtt]) {
    const int64_t width = in.att->size(1);
    const bool alone = !(edge_grads && in.score == Score::gatv2);  // else the edge term's share is added unrounded
    att_grad = alone && call.att_width() == width ? grads[kAtt] : call.empty({heads, call.att_width()});
    call.sum_att_shares(att_grad);
    att_grad = att_grad.narrow(1, 0, width);
  }
  if (in.edge_attr && in.score == Score::gatv2 && edge_grads) {
    gatv2_edge_gradients(call, in, ds, needs, grads, att_grad);
  }
  if (needs[kAtt] && att_grad.data_ptr() != grads[kAtt].data_ptr()) grads[kAtt].copy_(att_grad);
  if (in.edge_attr && in.score == Score::gat && edge_grads) {
    gat_edge_gradients(call, in, order.by_position, ds, needs, grads);
  }
  if (dot_edges && edge_grads) {
    const double scale = in.coefficient;
    const auto summed = [&](const Tensor& given) { return aggregate_edges<A>(in, order, {}, given); };
    const Tensor key_sums = summed(ds);
    if (needs[kDst]) grads[kDst].copy_(grad_dst + scale * from_edge_space(key_sums, *in.edge_proj));
    if (needs[kEdgeProj]) {
      Tensor sum = scale * products_of_rows(in.dst.to(in.opmath()), key_sums);
      if (grad_out) sum += products_of_rows(grad_out->to(in.opmath()), summed(weights_out));
      grads[kEdgeProj].copy_(sum);
    }
    if (needs[kEdgeAttr]) {
      features_gradient(call, in, order.by_position, ds, projected_dst * scale, grad_out ? weights_out : Tensor(),
                        projected_grad, grads[kEdgeAttr]);
    }
  }
}

std::tuple<Tensor, Tensor> attention(AttentionCall in, Optional<at::ScalarType> out_dtype) {
  const char* op = "edgeless::attention";
  in.dst = with_dim(in.dst, in.score), in.src = with_dim(in.src, in.score);
  check_call(op, in);
  const auto kind = out_dtype.value_or(in.rows());
  TORCH_CHECK_VALUE(kind == in.rows() || kind == in.opmath(), op, ": out_dtype must be ", in.rows(), " or ",
                    in.opmath(), ", got ", kind);
  Tensor out = at::empty({in.num_dst(), in.heads(), in.channels()}, in.dst.options().dtype(kind));
  Tensor softmax_stats = at::empty(in.stats_shape(), in.dst.options().dtype(in.opmath()));
  if (softmax_stats.numel() == 0) return {out, softmax_stats};
  if (!in.value && !values_are_keys(in.score)) in.value = in.src;
  with_arithmetic(in.rows(), [&](auto zero) {
    forward<decltype(zero)>(in, out, softmax_stats);
    return 0;
  });
  return {out, softmax_stats};
}

Tensor softmax_sum(const Tensor& logits, const Tensor& value, at::TensorList csr, at::IntArrayRef max_degrees) {
  const Tensor number = at::empty({1, 1, 1}, value.options().dtype(opmath_dtype(value.scalar_type())));
  const AttentionCall in = softmax_sum_call(logits, value, csr, max_degrees, number);
  const Tensor out = at::empty({in.num_dst(), in.heads(), in.channels()}, value.options());
  if (logits.numel() == 0 || out.numel() == 0) return out.zero_();
  with_arithmetic(in.rows(), [&](auto zero) {
    Call<decltype(zero)> call(in);
    call.args.dst = call.args.src = {};
    call.args.logit_term = call.keep(logits.contiguous());
    call.args.out = call.out_rows(out);
    call.run(Pass::forward, in.graph.csr, in.num_src());
    return 0;
  });
  return out;
}

Tensor attention_weights(AttentionCall in, const Tensor& softmax_stats) {
  const char* op = "edgeless::attention_weights";
  in.dst = with_dim(in.dst, in.score), in.src = with_dim(in.src, in.score);
  check_call(op, in);
  check_stats(op, in, softmax_stats);
  return with_arithmetic(in.rows(), [&](auto zero) { return weights<decltype(zero)>(in, softmax_stats); });
}

std::vector<Tensor> attention_backward(AttentionCall in, AttentionGrads g) {
  const char* op = "edgeless::attention_backward";
  check_call(op, in);
  check_grads(op, in, g);
  if (g.grad_weights) {
    in.edge_scale.reset();
    if (!g.dropped_weights) in.dropout = 0;
  }
  const OptTensor given[] = {in.dst, in.src, in.value, in.att, in.edge_attr, in.edge_proj, in.edge_scale};
  const bool nothing = g.softmax_stats.numel() == 0 || in.src.numel() == 0 || (g.grad_out && g.grad_out->numel() == 0);
  std::vector<Tensor> grads(kAttentionInputs);
  for (size_t i = 0; i < kAttentionInputs; ++i) {
    g.needs[i] = g.needs[i] && given[i].has_value();
    const bool later = (i == kSrc || i == kValue) && !nothing && (g.grad_out || i == kSrc);  // see backward()
    grads[i] = at::empty(g.needs[i] && !later ? given[i]->sizes() : at::IntArrayRef{0},
                         (g.needs[i] ? *given[i] : in.dst).options());
    if (nothing || (g.grad_weights && (i == kValue || i == kEdgeScale))) grads[i].zero_();
  }
  if (nothing) return grads;
  if (g.grad_weights) {
    g.needs[kValue] = g.needs[kEdgeScale] = false;
    in.value.reset();
  }
  const bool value_is_src = g.grad_out && !in.value && !values_are_keys(in.score);
  const bool needs_src = g.needs[kSrc];
  if (value_is_src) {
    in.value = in.src;
    g.needs[kValue] = needs_src;
  }
  g.side_by_side = g.side_by_side && g.grad_out && !value_is_src && in.score != Score::gat;
  with_arithmetic(in.rows(), [&](auto zero) {
    backward<decltype(zero)>(in, g, grads, false);
    return 0;
  });
  if (value_is_src) {
    if (needs_src) grads[kSrc] += grads[kValue];
    grads[kValue] = at::empty({0}, in.dst.options());
  }
  return grads;
}

// A pass reads the query-side row before it writes the row's gradient: in the same lanes, or before a block-wide
// barrier; segments of rows that several blocks share are merged by a later launch. So gradients may overwrite these
// rows.
Tensor attention_backward_into(const AttentionCall& in, const AttentionGrads& g, at::TensorList into) {
  const char* op = "edgeless::attention_backward_into";
  check_call(op, in);
  check_grads(op, in, g);
  check_into(op, in, into);
  std::vector<Tensor> grads(into.begin(), into.end());
  grads.resize(kAttentionInputs);
  const bool of_att = g.needs[kAtt];
  grads[kAtt] = at::empty(of_att ? in.att->sizes() : at::IntArrayRef{0}, (in.att ? *in.att : in.dst).options());
  if (g.softmax_stats.numel() == 0 || in.src.numel() == 0 || g.grad_out->numel() == 0) {
    for (const Tensor& t : into) t.zero_();
    return grads[kAtt].zero_();
  }
  with_arithmetic(in.rows(), [&](auto zero) {
    backward<decltype(zero)>(in, g, grads, true);
    return 0;
  });
  return grads[kAtt];
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("attention", attention_op<attention>);
  m.impl("softmax_sum", softmax_sum);
  m.impl("attention_weights", attention_weights_op<attention_weights>);
  m.impl("attention_backward", attention_backward_op<attention_backward>);
  m.impl("attention_backward_into", attention_backward_into_op<attention_backward_into>);
}

}  // namespace edgeless::cuda