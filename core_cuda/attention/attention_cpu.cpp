// The attention ops on the CPU: checks, allocation, and scheduling of the parts of each pass on threads.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "../common/cpu/partition.h"
#include "../common/cpu/room.h"
#include "../common/cpu/tensors.h"
#include "../common/dropout.h"
#include "calls.h"
#include "cpu/args.h"
#include "cpu/dispatch.h"

namespace edgeless::cpu {
namespace {

// One call of an op: the arguments of its passes and the tensors that own their memory.
template <class A>
class Call {
 public:
  Args<A> args{};
  Kernels<A> kernels{};

  explicit Call(const AttentionCall& in) : in_(in), options_(in.dst.options().dtype(in.opmath())) {
    kernels = choose_kernels<A>(in.score, in.dim(), in.channels());
    const bool scalar_score = in.score == Score::gat;
    args.heads = in.heads();
    args.dim = in.dim();
    args.channels = in.channels();
    args.edge_dim = in.edge_dim();
    args.padded_dim = scalar_score ? 1 : pad(args.dim);
    args.padded_channels = pad(args.channels);
    args.coefficient = static_cast<A>(in.coefficient);
    args.edge_in_value = in.score == Score::dot && in.edge_attr;
    args.dst = rows(in.dst);
    args.src = rows(in.src);
    if (in.value) args.value = rows(*in.value);
    // The cosine's att holds a factor even where rows have no features.
    if (in.att) args.att = keep(padded(in.att->to(in.opmath()), std::max(args.padded_dim, in.att->size(1))));
    if (in.edge_attr) set_edge_term();
    if (in.edge_scale) {
      args.edge_scale = in.edge_scale->const_data_ptr<A>();
      args.scale_edge_stride = in.edge_scale->stride(0);
      args.scale_head_stride = in.edge_scale->stride(1);
    }
    args.keep_scale = A(1);
    if (in.dropout > 0) {
      args.has_dropout = true;
      args.seed = static_cast<uint64_t>(in.seed->const_data_ptr<int64_t>()[0]);
      set_dropout_rate(args, in.dropout);
    }
  }

  Rows rows(const at::Tensor& t) {
    kept_.push_back(packed_rows(t));
    return rows_of(kept_.back());
  }

  void set_statistics(const at::Tensor& softmax_stats) {
    args.maximum = softmax_stats.data_ptr<A>();
    args.inverse_sum = args.maximum + softmax_stats.stride(0);
  }

  A* zeros(at::IntArrayRef shape, at::Tensor* tensor) {
    *tensor = at::zeros(shape, options_);
    return tensor->data_ptr<A>();
  }

  int64_t term_width() const {
    return (args.heads * args.padded_dim + kernels.width - 1) / kernels.width * kernels.width;
  }

  // Sets the graph and the partition; returns the number of parts. Parts that need `bytes_per_part` each are limited to
  // most_bytes in total. Parts depend on shapes alone, and so does the order of summation.
  int64_t set_graph(at::TensorList graph, int64_t bytes_per_part = 0) {
    args.graph = compressed(graph);
    args.items_per_part = choose_items_per_part(args.graph);
    constexpr int64_t most_bytes = int64_t(32) << 20;
    if (bytes_per_part > 0) {
      const int64_t most_parts = std::max<int64_t>(8, most_bytes / bytes_per_part);
      const int64_t items = (total_items(args.graph) + most_parts - 1) / most_parts;
      args.items_per_part = std::max(args.items_per_part, items);
    }
    return num_parts(args.graph, args.items_per_part);
  }

  void run(Pass pass) {
    const int64_t parts = num_parts(args.graph, args.items_per_part);
    const int64_t carry = kernels.carry_size(pass, args);
    at::Tensor carried;
    args.carry = nullptr;
    if (parts > 1 && carry > 0) {
      carried = at::empty({parts * 2 * carry}, options_);
      args.carry = carried.data_ptr<A>();
    }
    const int64_t scratch = kernels.scratch_size(args);
    for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.run(pass, args, part, memory); });
    if (!args.carry) return;
    for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.merge(pass, args, part, memory); });
  }

 private:
  int64_t pad(int64_t n) const { return (n + kernels.width - 1) / kernels.width * kernels.width; }

  const A* keep(const at::Tensor& t) {
    kept_.push_back(t);
    return kept_.back().template data_ptr<A>();
  }

  at::Tensor padded(const at::Tensor& t, int64_t width) const {
    if (t.size(1) == width) return t.contiguous();
    at::Tensor wide = at::zeros({t.size(0), width}, options_);
    wide.narrow(1, 0, t.size(1)).copy_(t);
    return wide;
  }

  void set_edge_term() {
    args.edge_attr = rows(*in_.edge_attr);
    args.proj_rows = keep(in_.edge_proj->contiguous());
    at::Tensor wide = at::zeros({args.edge_dim, term_width()}, options_);
    wide.narrow(1, 0, args.heads * args.padded_dim)
        .view({args.edge_dim, args.heads, args.padded_dim})
        .narrow(2, 0, args.dim)
        .copy_(in_.edge_proj->permute({2, 0, 1}));
    args.proj = keep(wide);
  }

  const AttentionCall& in_;
  at::TensorOptions options_;
  std::vector<at::Tensor> kept_;
};

// Sums `partial` over its first dimension, the parts, in order.
at::Tensor sum_parts(const at::Tensor& partial) {
  at::Tensor total = partial[0].clone();
  for (int64_t p = 1; p < partial.size(0); ++p) total += partial[p];
  return total;
}

std::tuple<at::Tensor, at::Tensor> attention(AttentionCall in, Optional<at::ScalarType> out_dtype) {
  const char* op = "edgeless::attention";
  in.dst = with_dim(in.dst, in.score), in.src = with_dim(in.src, in.score);
  check_call(op, in);
  const auto kind = out_dtype.value_or(in.rows());
  TORCH_CHECK_VALUE(kind == in.rows() || kind == in.opmath(), op, ": out_dtype must be ", in.rows(), " or ",
                    in.opmath(), ", got ", kind);
  at::Tensor out = empty_rows({in.num_dst(), in.heads(), in.channels()}, in.dst.options().dtype(kind));
  at::Tensor softmax_stats = at::empty(in.stats_shape(), in.dst.options().dtype(in.opmath()));
  if (softmax_stats.numel() == 0) return {out, softmax_stats};
  with_arithmetic(in.rows(), [&](auto zero) {
    using A = decltype(zero);
    Call<A> call(in);
    call.set_graph(in.graph.csr);
    call.args.out = out_rows(out);
    call.set_statistics(softmax_stats);
    call.run(Pass::forward);
    return 0;
  });
  return {out, softmax_stats};
}

// Passes the logits as edge features that an identity projection assigns to the heads.
at::Tensor softmax_sum(const at::Tensor& logits, const at::Tensor& value, at::TensorList csr,
                       at::IntArrayRef max_degrees) {
  const auto options = value.options().dtype(opmath_dtype(value.scalar_type()));
  AttentionCall in = softmax_sum_call(logits, value, csr, max_degrees, at::zeros({1, 1, 1}, options));
  in.edge_attr = logits, in.edge_proj = at::eye(in.heads(), options).unsqueeze(1);
  return std::get<0>(attention(in, in.rows()));
}

at::Tensor attention_weights(AttentionCall in, const at::Tensor& softmax_stats) {
  const char* op = "edgeless::attention_weights";
  in.dst = with_dim(in.dst, in.score), in.src = with_dim(in.src, in.score);
  check_call(op, in);
  check_stats(op, in, softmax_stats);
  at::Tensor weights = empty_rows({in.num_edges(), in.heads()}, softmax_stats.options());
  if (weights.numel() == 0) return weights;
  with_arithmetic(in.rows(), [&](auto zero) {
    using A = decltype(zero);
    Call<A> call(in);
    call.set_graph(in.graph.csr);
    call.args.edge_in_value = false;
    const at::Tensor statistics = softmax_stats.contiguous();
    call.set_statistics(statistics);
    call.args.weights = weights.data_ptr<A>();
    call.run(Pass::weights);
    return 0;
  });
  return weights;
}

template <class A>
void backward(const AttentionCall& in, const AttentionGrads& given, std::vector<at::Tensor>& grads) {
  const auto& [grad_out, grad_weights, out, softmax_stats, needs, dropped_weights, side_by_side] = given;
  Call<A> call(in);
  auto& args = call.args;
  at::Tensor edge_grads;
  if (grad_out) {
    args.grad_out = call.rows(*grad_out);
    args.saved_out = call.rows(*out);
  } else {
    edge_grads = grad_weights->contiguous();
    args.grad_weights = edge_grads.data_ptr<A>();
    args.edge_in_value = false;
  }
  const at::Tensor stats = at::empty({in.num_dst(), kStats, args.heads}, softmax_stats.options());
  stats.narrow(1, 0, 2).copy_(softmax_stats.transpose(0, 1));
  args.stats = stats.data_ptr<A>();
  // For rows of one chunk the destination pass recomputes Delta from the weights, which is needed where <out, grad_out>
  // may differ from that sum by rounding.
  const bool inexact =
      grad_out && (in.edge_scale || in.dropout > 0 || in.edge_attr || out->scalar_type() != in.opmath());
  const bool by_dst =
      inexact || needs[kDst] || needs[kAtt] || needs[kEdgeAttr] || needs[kEdgeProj] || needs[kEdgeScale];
  if (!grad_out || !by_dst) {
    call.set_graph(in.graph.csr);
    call.run(grad_out ? Pass::delta_of_out : Pass::delta);
  }
  if (by_dst) {
    const int64_t term = args.edge_dim * call.term_width();
    const int64_t parts = call.set_graph(in.graph.csr, needs[kEdgeProj] ? term * int64_t(sizeof(A)) : 0);
    at::Tensor att_parts, proj_parts;
    if (needs[kDst]) args.grad_dst = out_rows(grads[kDst]);
    if (needs[kAtt]) args.grad_att = call.zeros({parts, args.heads, args.padded_dim}, &att_parts);
    if (needs[kEdgeProj]) args.grad_proj = call.zeros({parts, args.edge_dim, call.term_width()}, &proj_parts);
    if (needs[kEdgeAttr]) args.grad_attr = out_rows(grads[kEdgeAttr]);
    if (needs[kEdgeScale] && grad_out) args.grad_scale = grads[kEdgeScale].data_ptr<A>();
    call.run(Pass::by_dst);
    args.grad_scale = nullptr;
    if (needs[kAtt]) grads[kAtt].copy_(sum_parts(att_parts).narrow(1, 0, in.att->size(1)));
    if (needs[kEdgeProj]) {
      grads[kEdgeProj].copy_(sum_parts(proj_parts)
                                 .narrow(1, 0, args.heads * args.padded_dim)
                                 .view({args.edge_dim, args.heads, args.padded_dim})
                                 .narrow(2, 0, args.dim)
                                 .permute({1, 2, 0}));
    }
  }
  if (needs[kSrc] || needs[kValue]) {
    TORCH_CHECK_VALUE(!in.graph.csc.empty(),
                      "edgeless::attention_backward: csc is needed for the gradient of a source tensor");
    call.set_graph(in.graph.csc);
    args.grad_src = needs[kSrc] ? out_rows(grads[kSrc]) : OutRows{};
    args.grad_value = needs[kValue] ? out_rows(grads[kValue]) : OutRows{};
    call.run(Pass::by_src);
  }
}

std::vector<at::Tensor> attention_backward(AttentionCall in, AttentionGrads g) {
  const char* op = "edgeless::attention_backward";
  check_call(op, in);
  check_grads(op, in, g);
  if (g.grad_weights && !g.dropped_weights) in.dropout = 0;
  const OptTensor given[] = {in.dst, in.src, in.value, in.att, in.edge_attr, in.edge_proj, in.edge_scale};
  std::vector<at::Tensor> grads(kAttentionInputs);
  for (size_t i = 0; i < kAttentionInputs; ++i) {
    g.needs[i] = g.needs[i] && given[i].has_value();
    grads[i] = g.needs[i] ? empty_rows(given[i]->sizes(), given[i]->options()) : at::empty({0}, in.dst.options());
    if (g.needs[i] && (i == kValue || i == kEdgeScale) && g.grad_weights) grads[i].zero_();
  }
  if (g.softmax_stats.numel() == 0 || in.src.numel() == 0 || (g.grad_out && g.grad_out->numel() == 0)) {
    for (auto& grad : grads) grad.zero_();
    return grads;
  }
  with_arithmetic(in.rows(), [&](auto zero) {
    backward<decltype(zero)>(in, g, grads);
    return 0;
  });
  return grads;
}

// A pass reads its query-side row before it writes the row's gradient: at the row's end, or, for a row that parts
// share, in merge() when all parts are done. So gradients may overwrite these rows. The gradient of dst may not
// overwrite an output of another layout, some of whose rows are still to be read.
at::Tensor attention_backward_into(const AttentionCall& in, const AttentionGrads& g, at::TensorList into) {
  const char* op = "edgeless::attention_backward_into";
  check_call(op, in);
  check_grads(op, in, g);
  check_into(op, in, into);
  std::vector<at::Tensor> grads(into.begin(), into.end());
  grads.resize(kAttentionInputs);
  grads[kAtt] = at::empty(g.needs[kAtt] ? in.att->sizes() : at::IntArrayRef{0}, (in.att ? *in.att : in.dst).options());
  if (g.softmax_stats.numel() == 0 || in.src.numel() == 0 || g.grad_out->numel() == 0) {
    for (const at::Tensor& t : into) t.zero_();
    return grads[kAtt].zero_();
  }
  const at::Tensor &of_dst = into[kDst], &out = *g.out;
  const bool apart = of_dst.is_alias_of(out) && !(of_dst.data_ptr() == out.data_ptr() &&
                                                  of_dst.stride(0) == out.stride(0) && of_dst.dtype() == out.dtype());
  if (apart) grads[kDst] = empty_rows(of_dst.sizes(), of_dst.options());
  with_arithmetic(in.rows(), [&](auto zero) {
    backward<decltype(zero)>(in, g, grads);
    return 0;
  });
  if (apart) of_dst.copy_(grads[kDst]);
  return grads[kAtt];
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("attention", WithRoom<attention_op<attention>>::call);
  m.impl("softmax_sum", WithRoom<softmax_sum>::call);
  m.impl("attention_weights", WithRoom<attention_weights_op<attention_weights>>::call);
  m.impl("attention_backward", WithRoom<attention_backward_op<attention_backward>>::call);
  m.impl("attention_backward_into", attention_backward_into_op<attention_backward_into>);  // overwrites its inputs
}

}  // namespace edgeless::cpu
