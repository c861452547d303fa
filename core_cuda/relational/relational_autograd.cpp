// The gradients of the typed GEMM ops. Those of typed_mm and typed_outer are each other, and those of typed_linear and
// typed_sums are composed of these, so all can be differentiated any number of times.
#include <ATen/ATen.h>

#include <functional>

#include "plain.h"

namespace edgeless {
namespace {

Tensor typed_outer(const Tensor& x, const Tensor& y, const Tensor& offsets, const OptTensor& rows);

struct TypedMM : Function<TypedMM> {
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

struct TypedOuter : Function<TypedOuter> {
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

Tensor typed_outer_op(const Tensor& x, const Tensor& y, const Tensor& offsets) {
  static const Kernels kernels("edgeless::typed_outer", typed_outer);
  return kernels.op(x, y, offsets, {});
}

struct TypedSums : Function<TypedSums> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& offsets) {
    ctx->save_for_backward({x, offsets});
    return call_typed_sums(x, offsets);
  }

  // Every row gets the gradient of its type's sum.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor ones = at::ones_symint({saved[0].sym_size(0), 1}, saved[0].options());
    return {typed_mm_op(ones, grads[0].unsqueeze(1), saved[1], {}), Tensor()};
  }
};

Tensor typed_sums(const Tensor& x, const Tensor& offsets) {
  return at::GradMode::is_enabled() ? TypedSums::apply(x, offsets) : call_typed_sums(x, offsets);
}

struct TypedLinear : Function<TypedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                        const Tensor& offsets) {
    ctx->save_for_backward({x, weight, offsets});
    ctx->saved_data["bias"] = bias.has_value();
    return call_typed_linear(x, weight, bias, offsets);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    Needs need(ctx);
    Tensor grad_x, grad_weight, grad_bias;
    if (need()) grad_x = typed_mm_op(grads[0], saved[1], saved[2], {});
    if (need()) grad_weight = typed_outer_op(grads[0], saved[0], saved[2]);
    if (need(ctx->saved_data["bias"].toBool())) {
      static const Kernels kernels("edgeless::typed_sums", typed_sums);
      grad_bias = kernels.op(grads[0], saved[2]);
    }
    return {grad_x, grad_weight, grad_bias, Tensor()};
  }
};

Tensor typed_linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& offsets) {
  return at::GradMode::is_enabled() ? TypedLinear::apply(x, weight, bias, offsets)
                                    : call_typed_linear(x, weight, bias, offsets);
}

// Plain form of typed_blend. Inputs: y, x and alpha.
struct PlainBlend {
  Tensor offsets;
  OptTensor rows;

  variable_list operator()(const variable_list& inputs) const {
    const auto wide = [&](size_t i) { return inputs[i].to(opmath_dtype(inputs[i].scalar_type())); };
    Tensor types = ranges_of(offsets, inputs[0].size(0));
    if (rows) types = at::empty_like(types).scatter(0, rows->to(at::kLong), types);
    const Tensor alpha = EdgeEnds(types, inputs[2].size(0)).gather(wide(2).unsqueeze(1));
    return {alpha * wide(0) + (1 - alpha) * wide(1)};
  }
};

// Blends two rows with the weight of their type. offsets and rows have no gradient.
struct TypedBlend : Function<TypedBlend> {
  static Tensor forward(AutogradContext* ctx, const Tensor& y, const Tensor& x, const Tensor& alpha,
                        const Tensor& offsets, const OptTensor& rows) {
    ctx->save_for_backward({y, x, alpha, offsets, rows.value_or(Tensor())});
    return call_typed_blend(y, x, alpha, offsets, rows);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptTensor rows = saved[4].defined() ? OptTensor(saved[4]) : OptTensor();
    Needs need(ctx);
    c10::List<bool> needs;
    for (int i = 0; i < 3; ++i) needs.push_back(need());
    const auto make_plain = [&]() -> Plain { return PlainBlend{saved[3], rows}; };
    variable_list found = differentiable_again({saved[0], saved[1], saved[2]}, {grads[0]}, make_plain, [&] {
      return call_typed_blend_backward(grads[0], saved[0], saved[1], saved[2], saved[3], rows, needs);
    });
    for (size_t i = 0; i < found.size(); ++i) {
      if (!needs[i]) found[i] = Tensor();
    }
    found.resize(5);
    return found;
  }
};

Tensor typed_blend(const Tensor& y, const Tensor& x, const Tensor& alpha, const Tensor& offsets,
                   const OptTensor& rows) {
  return at::GradMode::is_enabled() ? TypedBlend::apply(y, x, alpha, offsets, rows)
                                    : call_typed_blend(y, x, alpha, offsets, rows);
}

// Both directions of the graph, which have no gradient.
struct Directions {
  at::TensorList by_dst, by_src;
};

struct RelationalSum : Function<RelationalSum> {
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
    const auto make_plain = [&]() -> Plain {
      return [sum = PlainRelationalSum(saved.graph.csr, grads[0].size(0))](const variable_list& inputs) {
        return variable_list{sum(inputs[0], inputs[1], inputs[2])};
      };
    };
    variable_list found = differentiable_again({saved[0], saved[1], edge_weight}, {grads[0]}, make_plain, [&] {
      return call_relational_sum_backward(grads[0], saved[0], saved[1], edge_weight, saved.graph.csr, saved.graph.csc,
                                          needs);
    });
    for (size_t i = 0; i < found.size(); ++i) {
      if (!needs[i]) found[i] = Tensor();
    }
    found.resize(5);  // the directions and compute have no gradient
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
  m.impl("typed_linear", typed_linear);
  m.impl("typed_sums", typed_sums);
  m.impl("typed_blend", typed_blend);
  m.impl("relational_sum", relational_sum);
}

}  // namespace edgeless
