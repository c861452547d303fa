// Autograd of min and max over in-neighbors. The gradient goes to the saved arguments; features and extrema are read
// only by tie rules that divide it among all edges with the extremum.
#include <ATen/ATen.h>

#include "../common/kept_result.h"
#include "../common/second_derivatives.h"
#include "../spmm/edge_ends.h"
#include "inputs.h"

namespace edgeless {
namespace {

// The arguments that get no gradient.
struct Options {
  GraphArrays graph;
  c10::string_view reduce, ties;
  double fill;
};

std::tuple<Tensor, Tensor, Tensor> neighbor_reduce(const Tensor& x, at::TensorList csr, at::TensorList csc,
                                                   c10::string_view reduce, double fill, at::ScalarType arg_dtype,
                                                   c10::string_view ties, at::IntArrayRef max_degrees);

const auto& kernels() {
  static const Kernels found("edgeless::neighbor_reduce", neighbor_reduce);
  return found;
}

Tensor neighbor_reduce_backward(const Tensor& grad_out, const Tensor& x, const Tensor& out, const Tensor& arg,
                                const Tensor& tied, at::TensorList csr, at::TensorList csc, c10::string_view reduce,
                                c10::string_view ties, at::IntArrayRef max_degrees);

const auto& backward_kernels() {
  static const Kernels found("edgeless::neighbor_reduce_backward", neighbor_reduce_backward);
  return found;
}

// The extrema in plain form: a sum over edges of the edge's row times the share of the gradient that its elements get,
// which is a constant.
struct PlainReduce {
  std::vector<Tensor> csr;
  Tensor arg, tied;
  std::string reduce, ties;

  variable_list operator()(const variable_list& inputs) const {
    const Tensor x = inputs[0].to(opmath_dtype(inputs[0].scalar_type()));
    const int64_t edges = csr[1].size(0);
    const EdgeEnds to = EdgeEnds::of_rows(csr[0], edges), from(csr[1], x.size(0));
    const Tensor rows = from.gather(x);
    return {to.sum(rows * parts(x.detach(), rows.detach()))};
  }

  // The share of every edge, [E, width]: the backward of a gradient of ones on a graph where every edge has its own
  // source.
  Tensor parts(const Tensor& x, const Tensor& rows) const {
    // The extrema are recomputed, because the result may have been overwritten in place.
    const Tensor out = ties == "first" ? at::empty(arg.sizes(), x.options())
                                       : std::get<0>(kernels()(x, csr, {}, reduce, 0.0, at::kInt, ties, {}));
    const std::vector<Tensor> apart{csr[0], at::arange(rows.size(0), csr[0].options())};
    return backward_kernels()(at::ones_like(out), rows, out, arg, tied, apart, {}, reduce, ties, {});
  }
};

Tensor neighbor_reduce_backward(const Tensor& grad_out, const Tensor& x, const Tensor& out, const Tensor& arg,
                                const Tensor& tied, at::TensorList csr, at::TensorList csc, c10::string_view reduce,
                                c10::string_view ties, at::IntArrayRef max_degrees) {
  const auto make_plain = [&]() -> Plain {
    return PlainReduce{csr.vec(), arg, tied, {reduce.data(), reduce.size()}, {ties.data(), ties.size()}};
  };
  return differentiable_again({x}, {grad_out}, make_plain, [&] {
    return variable_list{backward_kernels()(grad_out, x, out, arg, tied, csr, csc, reduce, ties, max_degrees)};
  })[0];
}

struct NeighborReduce : Function<NeighborReduce> {
  using Compute = std::function<std::tuple<Tensor, Tensor, Tensor>()>;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Options& options, const Compute& compute,
                        Tensor* arg, Tensor* tied) {
    Tensor out;
    std::tie(out, *arg, *tied) = compute();
    // With ties "first", the backward needs only the sizes of x: the alias from variable_data() may be written in
    // place.
    const bool shares = options.ties != "first";
    save(ctx, {shares ? x : x.variable_data(), shares ? keep_result(ctx, out) : Tensor(), *arg, *tied}, options.graph);
    ctx->saved_data["reduce"] = std::string(options.reduce.data(), options.reduce.size());
    ctx->saved_data["ties"] = std::string(options.ties.data(), options.ties.size());
    ctx->saved_data["fill"] = options.fill;
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(5);
    if (!grads[0].defined()) return results;
    const Saved saved(ctx, 4);
    const std::string &reduce = ctx->saved_data.at("reduce").toStringRef(),
                      &ties = ctx->saved_data.at("ties").toStringRef();
    const GraphArrays& graph = saved.graph;
    Tensor out = saved[1];
    if (!out.defined()) {
      out = grads[0];
    } else if (!result_is_kept(ctx)) {
      out = std::get<0>(kernels()(saved[0], graph.csr, graph.csc, reduce, ctx->saved_data.at("fill").toDouble(),
                                  saved[2].scalar_type(), ties, graph.max_degrees));
    }
    results[0] = neighbor_reduce_backward(grads[0], saved[0], out, saved[2], saved[3], graph.csr, graph.csc, reduce,
                                          ties, graph.max_degrees);
    return results;
  }
};

std::tuple<Tensor, Tensor, Tensor> neighbor_reduce(const Tensor& x, at::TensorList csr, at::TensorList csc,
                                                   c10::string_view reduce, double fill, at::ScalarType arg_dtype,
                                                   c10::string_view ties, at::IntArrayRef max_degrees) {
  const NeighborReduce::Compute compute = [&] {
    return kernels()(x, csr, csc, reduce, fill, arg_dtype, ties, max_degrees);
  };
  if (!at::GradMode::is_enabled()) return compute();
  Tensor arg, tied;  // returned outside of autograd, since they have no gradient
  Tensor out = NeighborReduce::apply(x, Options{{csr, csc, max_degrees}, reduce, ties, fill}, compute, &arg, &tied);
  return {std::move(out), std::move(arg), std::move(tied)};
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("neighbor_reduce", neighbor_reduce);
  m.impl("neighbor_reduce_backward", neighbor_reduce_backward);
}

}  // namespace edgeless
