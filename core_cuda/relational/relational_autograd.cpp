// The gradients of the typed products. Those of typed_mm and typed_outer are each other, so both can be differentiated
// as often as one likes.
#include "calls.h"

namespace edgeless {
namespace {

Tensor typed_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows);
Tensor typed_outer(const Tensor& x, const Tensor& y, const Tensor& offsets, const OptTensor& rows);

Tensor typed_mm_op(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows) {
  static const Kernels kernels("edgeless::typed_mm", typed_mm);
  return kernels.op(x, weight, offsets, rows);
}

struct TypedMM : torch::autograd::Function<TypedMM> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& offsets,
                        const OptTensor& rows) {
    ctx->save_for_backward({x, weight, offsets, rows.value_or(Tensor())});
    return call_typed_mm(x, weight, offsets, rows);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptTensor rows = saved[3].defined() ? OptTensor(saved[3]) : OptTensor();
    Tensor grad_x, grad_weight;
    if (ctx->needs_input_grad(0)) grad_x = typed_mm_op(grads[0], saved[1].transpose(1, 2), saved[2], rows);
    if (ctx->needs_input_grad(1)) {
      static const Kernels kernels("edgeless::typed_outer", typed_outer);
      grad_weight = kernels.op(saved[0], grads[0], saved[2], rows);
    }
    return {grad_x, grad_weight, Tensor(), Tensor()};
  }
};

struct TypedOuter : torch::autograd::Function<TypedOuter> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& y, const Tensor& offsets,
                        const OptTensor& rows) {
    ctx->save_for_backward({x, y, offsets, rows.value_or(Tensor())});
    return call_typed_outer(x, y, offsets, rows);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptTensor rows = saved[3].defined() ? OptTensor(saved[3]) : OptTensor();
    Tensor grad_x, grad_y;
    if (ctx->needs_input_grad(0)) grad_x = typed_mm_op(saved[1], grads[0].transpose(1, 2), saved[2], rows);
    if (ctx->needs_input_grad(1)) grad_y = typed_mm_op(saved[0], grads[0], saved[2], rows);
    return {grad_x, grad_y, Tensor(), Tensor()};
  }
};

Tensor typed_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows) {
  return at::GradMode::is_enabled() ? TypedMM::apply(x, weight, offsets, rows)
                                    : call_typed_mm(x, weight, offsets, rows);
}

Tensor typed_outer(const Tensor& x, const Tensor& y, const Tensor& offsets, const OptTensor& rows) {
  return at::GradMode::is_enabled() ? TypedOuter::apply(x, y, offsets, rows) : call_typed_outer(x, y, offsets, rows);
}

// Both directions, which have no gradient.
struct Directions {
  at::TensorList by_dst, by_src;
};

struct RelationalSum : torch::autograd::Function<RelationalSum> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptTensor& edge_weight,
                        const Directions& graph, const std::function<Tensor()>& compute) {
    save(ctx, {x, weight, edge_weight}, {graph.by_dst, graph.by_src});
    return compute();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved saved(ctx, 3);
    const OptTensor edge_weight = saved.optional(2);
    Needs need(ctx);
    c10::List<bool> needs;
    needs.push_back(need()), needs.push_back(need()), needs.push_back(need(edge_weight.has_value()));
    variable_list found = once_differentiable("relational_sum", {grads[0], saved[0], saved[1], edge_weight}, [&] {
      return call_relational_sum_backward(grads[0], saved[0], saved[1], edge_weight, saved.graph.csr, saved.graph.csc,
                                          needs);
    });
    for (size_t i = 0; i < found.size(); ++i) {
      if (!needs[i]) found[i] = Tensor();
    }
    found.resize(5);  // of the directions and of compute
    return found;
  }
};

Tensor relational_sum(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, at::TensorList by_dst,
                      at::TensorList by_src, c10::SymInt num_dst, Optional<at::ScalarType> out_dtype) {
  const std::function<Tensor()> compute = [&] {
    return call_relational_sum(x, weight, edge_weight, by_dst, by_src, num_dst, out_dtype);
  };
  if (!at::GradMode::is_enabled()) return compute();
  return RelationalSum::apply(x, weight, edge_weight, Directions{by_dst, by_src}, compute);
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("typed_mm", typed_mm);
  m.impl("typed_outer", typed_outer);
  m.impl("relational_sum", relational_sum);
}

}  // namespace edgeless
