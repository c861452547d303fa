// Gradients of the projection ops. In C++, because on a GPU a layer on a small graph takes as long as what starts it.
#include <ATen/ATen.h>

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {
namespace {

using OptTensors = c10::List<OptTensor>;

std::vector<Tensor> call_project(const Tensor& x, at::TensorList weights, const OptTensors& biases, int64_t joined,
                                 Optional<at::ScalarType> dtype, at::IntArrayRef heads) {
  static const Kernels kernels("edgeless::project", call_project);
  return kernels(x, weights, biases, joined, dtype, heads);
}

std::vector<Tensor> call_project_backward(const OptTensors& grads, const Tensor& x, at::TensorList weights,
                                          c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                          Optional<at::ScalarType> map_dtype) {
  static const Kernels kernels("edgeless::project_backward", call_project_backward);
  return kernels(grads, x, weights, std::move(needs), x_dtype, map_dtype);
}

Tensor call_project_sum(at::TensorList xs, at::TensorList weights, const OptTensor& bias,
                        Optional<at::ScalarType> dtype) {
  static const Kernels kernels("edgeless::project_sum", call_project_sum);
  return kernels(xs, weights, bias, dtype);
}

std::vector<Tensor> call_project_sum_backward(const Tensor& grad, at::TensorList xs, at::TensorList weights,
                                              c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                              Optional<at::ScalarType> map_dtype) {
  static const Kernels kernels("edgeless::project_sum_backward", call_project_sum_backward);
  return kernels(grad, xs, weights, std::move(needs), x_dtype, map_dtype);
}

Tensor call_add_row(const Tensor& x, const Tensor& row) {
  static const Kernels kernels("edgeless::add_row", call_add_row);
  return kernels(x, row);
}

Tensor call_column_sums(const Tensor& x) {
  static const Kernels kernels("edgeless::column_sums", call_column_sums);
  return kernels(x);
}

std::vector<Tensor> call_cast_all(at::TensorList tensors, at::ScalarType dtype, bool side_by_side) {
  static const Kernels kernels("edgeless::cast_all", call_cast_all);
  return kernels(tensors, dtype, side_by_side);
}

std::vector<Tensor> call_node_logits(const Tensor& x, at::TensorList vectors) {
  static const Kernels kernels("edgeless::node_logits", call_node_logits);
  return kernels(x, vectors);
}

std::vector<Tensor> call_node_logits_backward(const OptTensors& grads, const Tensor& x, at::TensorList vectors,
                                              c10::List<bool> needs) {
  static const Kernels kernels("edgeless::node_logits_backward", call_node_logits_backward);
  return kernels(grads, x, vectors, std::move(needs));
}

OptTensors optional(const variable_list& tensors) {
  OptTensors given;
  for (const Tensor& t : tensors) given.push_back(t.defined() ? OptTensor(t) : OptTensor());
  return given;
}

// What autocast would do to the gradients: copies of those of another dtype, one launch for all of a dtype.
void cast_back(variable_list& tensors, const c10::List<int64_t>& dtypes) {
  const auto cast = [](variable_list group, at::ScalarType dtype) {
    if (!at::GradMode::is_enabled()) return call_cast_all(group, dtype, false);
    for (Tensor& t : group) t = t.to(dtype);
    return group;
  };
  cast_each(tensors, cast, [&](size_t i) { return static_cast<at::ScalarType>(dtypes.get(i)); });
}

// biases: those that are there; has_bias: which maps they belong to.
struct Project : torch::autograd::Function<Project> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights, at::TensorList biases,
                               const std::vector<bool>& has_bias, int64_t joined, Optional<at::ScalarType> dtype,
                               at::IntArrayRef heads) {
    OptTensors all;
    size_t next = 0;
    c10::List<bool> flags;
    for (const bool has : has_bias) all.push_back(has ? OptTensor(biases[next++]) : OptTensor()), flags.push_back(has);
    c10::List<int64_t> dtypes;
    for (const at::TensorList list : {at::TensorList(x), weights, biases}) {
      for (const Tensor& t : list) dtypes.push_back(static_cast<int64_t>(t.scalar_type()));
    }
    const bool traced = is_traced(x);
    const Maps maps(x, weights, all, traced ? 0 : joined, dtype,
                    [traced](const auto& tensors, at::ScalarType to) { return call_cast_all(tensors, to, !traced); });
    variable_list saved{maps.x};
    saved.insert(saved.end(), maps.weights.begin(), maps.weights.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["has_bias"] = std::move(flags);
    ctx->saved_data["dtypes"] = std::move(dtypes);
    ctx->set_materialize_grads(false);
    return call_project(maps.x, maps.weights, maps.biases, joined, {}, heads);
  }

  static variable_list backward(AutogradContext* ctx, variable_list given) {
    for (Tensor& grad : given) {
      if (grad.defined() && grad.dim() == 3) grad = grad.flatten(1);  // of heads
    }
    const variable_list saved = ctx->get_saved_variables();
    const c10::List<bool> has_bias = ctx->saved_data["has_bias"].toBoolList();
    const size_t maps = saved.size() - 1;
    const Tensor& x = saved[0];
    const at::TensorList weights(saved.data() + 1, maps);
    c10::List<bool> needs;
    for (size_t i = 0; i <= maps; ++i) needs.push_back(ctx->needs_input_grad(i));
    size_t next = 1 + maps;
    for (const bool has : has_bias) needs.push_back(has && ctx->needs_input_grad(next++));
    const c10::List<int64_t> dtypes = ctx->saved_data["dtypes"].toIntList();
    const auto dtype = [&](size_t i) { return static_cast<at::ScalarType>(dtypes.get(i)); };
    const variable_list found = at::GradMode::is_enabled()
                                    ? differentiable(given, x, weights)
                                    : call_project_backward(optional(given), x, weights, needs, dtype(0), dtype(1));
    variable_list grads;
    for (size_t i = 0; i < found.size(); ++i) {
      if (i <= maps || has_bias[i - 1 - maps]) grads.push_back(needs[i] ? found[i] : Tensor());
    }
    cast_back(grads, dtypes);
    grads.resize(grads.size() + 4);  // of has_bias, joined, dtype, heads
    return grads;
  }

  // To be differentiated once more: by torch's own products.
  static variable_list differentiable(const variable_list& given, const Tensor& x, at::TensorList weights) {
    Tensor grad_x = at::zeros_like(x);
    variable_list of_weights, of_biases;
    for (size_t k = 0; k < weights.size(); ++k) {
      const Tensor grad = given[k].defined() ? given[k] : x.new_zeros_symint({x.sym_size(0), weights[k].sym_size(0)});
      grad_x = grad_x + at::matmul(grad, weights[k]);
      of_weights.push_back(at::matmul(grad.t(), x));
      of_biases.push_back(grad.sum(0));
    }
    variable_list all{grad_x};
    all.insert(all.end(), of_weights.begin(), of_weights.end());
    all.insert(all.end(), of_biases.begin(), of_biases.end());
    return all;
  }
};

std::vector<Tensor> project(const Tensor& x, at::TensorList weights, const OptTensors& biases, int64_t joined,
                            Optional<at::ScalarType> dtype, at::IntArrayRef heads) {
  if (!at::GradMode::is_enabled()) return call_project(x, weights, biases, joined, dtype, heads);
  variable_list present;
  std::vector<bool> has_bias;
  for (size_t k = 0; k < biases.size(); ++k) {
    const OptTensor bias = biases.get(k);
    has_bias.push_back(bias.has_value());
    if (bias) present.push_back(*bias);
  }
  return Project::apply(x, weights, at::TensorList(present), has_bias, joined, dtype, heads);
}

struct ProjectSum : torch::autograd::Function<ProjectSum> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, at::TensorList xs, at::TensorList weights, const OptTensor& bias,
                        Optional<at::ScalarType> dtype) {
    c10::List<int64_t> dtypes;
    for (const at::TensorList list : {xs, weights}) {
      for (const Tensor& t : list) dtypes.push_back(static_cast<int64_t>(t.scalar_type()));
    }
    if (bias) dtypes.push_back(static_cast<int64_t>(bias->scalar_type()));
    const bool traced = is_traced(xs[0]);
    const Summands maps(xs, weights, bias, dtype, [traced](const auto& tensors, at::ScalarType to) {
      return call_cast_all(tensors, to, !traced);
    });
    variable_list saved = maps.xs;
    saved.insert(saved.end(), maps.weights.begin(), maps.weights.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["dtypes"] = std::move(dtypes);
    return call_project_sum(maps.xs, maps.weights, maps.bias, {});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const variable_list saved = ctx->get_saved_variables();
    const c10::List<int64_t> dtypes = ctx->saved_data["dtypes"].toIntList();
    const size_t count = saved.size() / 2;
    const auto dtype = [&](size_t first) {  // the widest of the inputs, or of the weights
      auto widest = static_cast<at::ScalarType>(dtypes.get(first));
      for (size_t i = first; i < first + count; ++i) {
        widest = at::promote_types(widest, static_cast<at::ScalarType>(dtypes.get(i)));
      }
      return widest;
    };
    const bool has_bias = dtypes.size() > 2 * count;
    const at::TensorList xs(saved.data(), count), weights(saved.data() + count, count);
    c10::List<bool> needs;
    for (size_t i = 0; i < 2 * count; ++i) needs.push_back(ctx->needs_input_grad(i));
    needs.push_back(has_bias && ctx->needs_input_grad(2 * count));
    variable_list grads = at::GradMode::is_enabled()
                              ? differentiable(given[0], xs, weights)
                              : call_project_sum_backward(given[0], xs, weights, needs, dtype(0), dtype(count));
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!needs[i]) grads[i] = Tensor();
    }
    if (!has_bias) grads.pop_back();
    cast_back(grads, dtypes);
    grads.emplace_back();  // of dtype
    if (!has_bias) grads.emplace_back();
    return grads;
  }

  // To be differentiated once more.
  static variable_list differentiable(const Tensor& grad, at::TensorList xs, at::TensorList weights) {
    variable_list grads;
    for (const Tensor& weight : weights) grads.push_back(at::matmul(grad, weight));
    for (const Tensor& x : xs) grads.push_back(at::matmul(grad.t(), x));
    grads.push_back(grad.sum(0));
    return grads;
  }
};

Tensor project_sum(at::TensorList xs, at::TensorList weights, const OptTensor& bias, Optional<at::ScalarType> dtype) {
  if (!at::GradMode::is_enabled()) return call_project_sum(xs, weights, bias, dtype);
  return ProjectSum::apply(xs, weights, bias, dtype);
}

struct ColumnSums : torch::autograd::Function<ColumnSums> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    ctx->saved_data["rows"] = x.sym_size(0);
    return call_column_sums(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0].expand_symint({ctx->saved_data["rows"].toSymInt(), grads[0].sym_size(0)})};
  }
};

Tensor column_sums(const Tensor& x) { return at::GradMode::is_enabled() ? ColumnSums::apply(x) : call_column_sums(x); }

struct AddRow : torch::autograd::Function<AddRow> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& row) {
    if (x.dim() == 3) ctx->saved_data["heads"] = x.sym_size(1), ctx->saved_data["channels"] = x.sym_size(2);
    return call_add_row(x, row);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    Tensor grad = grads[0];
    if (ctx->saved_data.count("heads")) {
      grad =
          grad.unflatten_symint(1, {ctx->saved_data.at("heads").toSymInt(), ctx->saved_data.at("channels").toSymInt()});
    }
    return {grad, ctx->needs_input_grad(1) ? column_sums(grads[0]) : Tensor()};
  }
};

Tensor add_row(const Tensor& x, const Tensor& row) {
  return at::GradMode::is_enabled() ? AddRow::apply(x, row) : call_add_row(x, row);
}

struct CastAll : torch::autograd::Function<CastAll> {
  static constexpr bool is_traceable = true;

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
    grads.emplace_back();  // of dtype
    return grads;
  }
};

struct NodeLogits : torch::autograd::Function<NodeLogits> {
  static constexpr bool is_traceable = true;

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
                              : call_node_logits_backward(optional(given), saved[0], vectors, needs);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!needs[i]) grads[i] = Tensor();
    }
    return grads;
  }

  // To be differentiated once more.
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
