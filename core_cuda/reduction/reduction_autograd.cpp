// The gradient of min and max over in-neighbours. It goes to the saved arguments; the features and the extrema are
// read only by rules that divide it among the edges that have the extremum.
#include "../common/kept_result.h"
#include "inputs.h"

namespace edgeless {
namespace {

Tensor neighbor_reduce_backward(const Tensor& grad_out, const Tensor& x, const Tensor& out, const Tensor& arg,
                                const Tensor& tied, at::TensorList csr, at::TensorList csc, c10::string_view reduce,
                                c10::string_view ties, at::IntArrayRef max_degrees) {
  static const Kernels kernels("edgeless::neighbor_reduce_backward", neighbor_reduce_backward);
  return once_differentiable("neighbor_reduce", {grad_out, x, out, arg, tied}, [&] {
    return variable_list{kernels(grad_out, x, out, arg, tied, csr, csc, reduce, ties, max_degrees)};
  })[0];
}

// The arguments of the op that have no gradient.
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

struct NeighborReduce : Function<NeighborReduce> {
  using Compute = std::function<std::tuple<Tensor, Tensor, Tensor>()>;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Options& options, const Compute& compute,
                        Tensor* arg, Tensor* tied) {
    Tensor out;
    std::tie(out, *arg, *tied) = compute();
    // Of what is not read the backward needs the sizes: an alias that may be written over, of x, gives them.
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
  Tensor arg, tied;  // beside autograd: they have no gradient
  Tensor out = NeighborReduce::apply(x, Options{{csr, csc, max_degrees}, reduce, ties, fill}, compute, &arg, &tied);
  return {std::move(out), std::move(arg), std::move(tied)};
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("neighbor_reduce", neighbor_reduce);
  m.impl("neighbor_reduce_backward", neighbor_reduce_backward);
}

}  // namespace edgeless
