// Autograd of the projection ops. It is in C++, because on a GPU a layer on a small graph takes as long as its
// launches.
#include "calls.h"

namespace edgeless {
namespace {

// `biases` holds the biases that exist; has_bias says which maps have one.
struct Project : Function<Project> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights, at::TensorList biases,
                               const std::vector<bool>& has_bias, int64_t joined, Optional<at::ScalarType> dtype,
                               at::IntArrayRef heads) {
    const Maps maps = MapInputs::take(ctx, x, weights, biases, has_bias, joined, dtype);
    variable_list saved{maps.x};
    saved.insert(saved.end(), maps.weights.begin(), maps.weights.end());
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    return call_project(maps.x, maps.weights, maps.biases, joined, {}, heads);
  }

  static variable_list backward(AutogradContext* ctx, variable_list given) {
    for (Tensor& grad : given) {
      if (grad.defined() && grad.dim() == 3) grad = heads_joined(grad);
    }
    const variable_list saved = ctx->get_saved_variables();
    const at::TensorList weights(saved.data() + 1, saved.size() - 1);
    variable_list grads = MapInputs::gradients(ctx, given, saved[0], weights);
    grads.resize(grads.size() + 4);  // for has_bias, joined, dtype, heads
    return grads;
  }
};

std::vector<Tensor> project(const Tensor& x, at::TensorList weights, const OptTensors& biases, int64_t joined,
                            Optional<at::ScalarType> dtype, at::IntArrayRef heads) {
  if (!at::GradMode::is_enabled()) return call_project(x, weights, biases, joined, dtype, heads);
  const Biases given(biases);
  return Project::apply(x, weights, at::TensorList(given.present), given.has, joined, dtype, heads);
}

struct ProjectSum : Function<ProjectSum> {
  static Tensor forward(AutogradContext* ctx, at::TensorList xs, at::TensorList weights, const OptTensor& bias,
                        Optional<at::ScalarType> dtype) {
    const Summands maps = SumInputs::take(ctx, xs, weights, bias, dtype);
    variable_list saved = maps.xs;
    saved.insert(saved.end(), maps.weights.begin(), maps.weights.end());
    ctx->save_for_backward(std::move(saved));
    return call_project_sum(maps.xs, maps.weights, maps.bias, {});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    variable_list saved = ctx->get_saved_variables();  // the xs, then the weights
    if (at::GradMode::is_enabled()) saved = with_histories(saved, 0);
    const size_t count = saved.size() / 2;
    const SumInputs inputs(ctx, count);
    c10::List<bool> needs;
    for (size_t i = 0; i < 2 * count; ++i) needs.push_back(ctx->needs_input_grad(i));
    needs.push_back(inputs.has_bias && ctx->needs_input_grad(2 * count));
    variable_list grads = inputs.gradients(given[0], at::TensorList(saved.data(), count),
                                           at::TensorList(saved.data() + count, count), needs);
    grads.emplace_back();  // for dtype, or for a missing bias
    if (!inputs.has_bias) grads.emplace_back();
    return grads;
  }
};

Tensor project_sum(at::TensorList xs, at::TensorList weights, const OptTensor& bias, Optional<at::ScalarType> dtype) {
  if (!at::GradMode::is_enabled()) return call_project_sum(xs, weights, bias, dtype);
  return ProjectSum::apply(xs, weights, bias, dtype);
}

struct ColumnSums : Function<ColumnSums> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    ctx->saved_data["rows"] = x.sym_size(0);
    return call_column_sums(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0].expand_symint({ctx->saved_data["rows"].toSymInt(), grads[0].sym_size(0)})};
  }
};

Tensor column_sums(const Tensor& x) { return at::GradMode::is_enabled() ? ColumnSums::apply(x) : call_column_sums(x); }

struct AddRow : Function<AddRow> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& row) {
    if (x.dim() == 3) ctx->saved_data["heads"] = x.sym_size(1), ctx->saved_data["channels"] = x.sym_size(2);
    return call_add_row(x, row);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    Tensor grad = grads[0];
    if (ctx->saved_data.count("heads")) {
      grad = heads_apart(grad, ctx->saved_data.at("heads").toSymInt(), ctx->saved_data.at("channels").toSymInt());
    }
    static const Kernels sums("edgeless::column_sums", column_sums);
    return {grad, ctx->needs_input_grad(1) ? sums.op(grads[0]) : Tensor()};
  }
};

Tensor add_row(const Tensor& x, const Tensor& row) {
  return at::GradMode::is_enabled() ? AddRow::apply(x, row) : call_add_row(x, row);
}

struct CastAll : Function<CastAll> {
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, at::ScalarType dtype) {
    c10::List<int64_t> dtypes;
    for (const Tensor& t : tensors) dtypes.push_back(static_cast<int64_t>(t.scalar_type()));
    ctx->saved_data["dtypes"] = std::move(dtypes);
    ctx->set_materialize_grads(false);
    return call_cast_all(tensors, dtype, false);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    variable_list grads = given;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!ctx->needs_input_grad(i)) grads[i] = Tensor();
    }
    cast_back(grads, ctx->saved_data["dtypes"].toIntList());
    grads.emplace_back();  // for dtype
    return grads;
  }
};

struct NodeLogits : Function<NodeLogits> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList vectors) {
    variable_list saved{x};
    saved.insert(saved.end(), vectors.begin(), vectors.end());
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    return call_node_logits(x, vectors);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const variable_list saved = ctx->get_saved_variables();
    const at::TensorList vectors(saved.data() + 1, saved.size() - 1);
    c10::List<bool> needs;
    for (size_t i = 0; i < saved.size(); ++i) needs.push_back(ctx->needs_input_grad(i));
    variable_list grads = at::GradMode::is_enabled()
                              ? differentiable(given, saved[0], vectors)
                              : call_node_logits_backward(optional(given), saved[0], vectors, needs, {});
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!needs[i]) grads[i] = Tensor();
    }
    return grads;
  }

  // The gradients by differentiable torch ops.
  static variable_list differentiable(const variable_list& given, const Tensor& x, at::TensorList vectors) {
    variable_list grads{at::zeros_like(x)};
    for (size_t k = 0; k < vectors.size(); ++k) {
      if (!given[k].defined()) {
        grads.push_back(at::zeros_like(vectors[k]));
        continue;
      }
      const Tensor grad = given[k].unsqueeze(-1);
      grads[0] = grads[0] + (grad * vectors[k]).to(x.scalar_type());
      grads.push_back((grad * x).sum(0, vectors[k].dim() == 3).to(vectors[k].scalar_type()));
    }
    return grads;
  }
};

std::vector<Tensor> node_logits(const Tensor& x, at::TensorList vectors) {
  return at::GradMode::is_enabled() ? NodeLogits::apply(x, vectors) : call_node_logits(x, vectors);
}

std::vector<Tensor> cast_all(at::TensorList tensors, at::ScalarType dtype, bool side_by_side) {
  return at::GradMode::is_enabled() ? CastAll::apply(tensors, dtype) : call_cast_all(tensors, dtype, side_by_side);
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("project", project);
  m.impl("project_sum", project_sum);
  m.impl("add_row", add_row);
  m.impl("column_sums", column_sums);
  m.impl("cast_all", cast_all);
  m.impl("node_logits", node_logits);
}

}  // namespace edgeless
