// A layer that sums neighbours, as one autograd node with two maps: of the sums and of the rows themselves. See
// attention_layer.cpp.
#include "../projection/calls.h"
#include "../spmm/calls.h"

namespace edgeless {
namespace {

// The arguments without a gradient.
struct Sum {
  const OptTensor &weight, &src_scale, &dst_scale;
  GraphArrays graph;
  Optional<at::ScalarType> dtype;

  Tensor of(const Tensor& x) const { return call_spmm(x, weight, src_scale, dst_scale, graph); }
};

struct SumLayer : Function<SumLayer> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights, at::TensorList bias,
                        const Sum& sum) {
    const Tensor sums = sum.of(x);
    const Summands maps = SumInputs::take(ctx, {sums, x}, weights, bias.empty() ? OptTensor() : bias[0], sum.dtype);
    save(ctx, {maps.xs[0], maps.xs[1], maps.weights[0], maps.weights[1], sum.weight, sum.src_scale, sum.dst_scale},
         sum.graph);
    return call_project_sum(maps.xs, maps.weights, maps.bias, {});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const Saved saved(ctx, 7);
    const SumInputs inputs(ctx, 2);
    const OptTensor weight = saved.optional(4), src_scale = saved.optional(5), dst_scale = saved.optional(6);
    const bool of_x = ctx->needs_input_grad(0), again = at::GradMode::is_enabled();
    c10::List<bool> needs;
    for (const size_t i : {0, 0, 1, 2}) needs.push_back(ctx->needs_input_grad(i));
    needs.push_back(inputs.has_bias && ctx->needs_input_grad(3));
    // For second derivatives, the saved sums get the autograd history of the SpMM that computed them.
    Tensor sums = saved[0], x = saved[1];
    if (again) {
      x = with_history(x, 0);
      const Tensor made = spmm_op(x, weight, src_scale, dst_scale, saved.graph);
      sums = with_derivatives_of(sums, made.to(sums.scalar_type()));
    }
    const variable_list weights{with_history(saved[2], 1), with_history(saved[3], 2)};
    variable_list grads = inputs.gradients(given[0], {sums, x}, weights, needs);
    if (of_x && again) {
      grads[1] = grads[1] + spmm_op(grads[0], weight, dst_scale, src_scale, saved.graph.reversed());
    } else if (of_x) {
      grads[1] = call_spmm(grads[0], weight, dst_scale, src_scale, saved.graph.reversed()).add_(grads[1]);
    }
    grads.erase(grads.begin());
    grads.emplace_back();  // `sum` has no gradient
    return grads;
  }
};

Tensor sum_layer(const Tensor& x, at::TensorList weights, const OptTensor& bias, const OptTensor& edge_weight,
                 const OptTensor& src_scale, const OptTensor& dst_scale, at::TensorList csr, at::TensorList csc,
                 Optional<at::ScalarType> dtype, at::IntArrayRef max_degrees) {
  TORCH_CHECK_VALUE(weights.size() == 2, "edgeless::sum_layer: weights must be 2, got ", weights.size());
  TORCH_CHECK_VALUE(!edge_weight || !edge_weight->requires_grad() || !at::GradMode::is_enabled(),
                    "edgeless::sum_layer: edge_weight must not need a gradient");
  const Sum sum{edge_weight, src_scale, dst_scale, {csr, csc, max_degrees}, dtype};
  if (!at::GradMode::is_enabled()) return call_project_sum({sum.of(x), x}, weights, bias, dtype);
  variable_list given;
  if (bias) given.push_back(*bias);
  return SumLayer::apply(x, weights, at::TensorList(given), sum);
}

}  // namespace

// The layer is composed of other ops on every device and has no kernels of its own.
TORCH_LIBRARY_IMPL(edgeless, CompositeImplicitAutograd, m) { m.impl("sum_layer", sum_layer); }

}  // namespace edgeless
