// Gradients of the projection ops. In C++, because on a GPU a layer on a small graph takes as long as what starts it.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "inputs.h"

namespace edgeless {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

template <class Signature>
auto op_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

std::vector<Tensor> call_project(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
  static const auto op =
      op_of<std::vector<Tensor>(const Tensor&, at::TensorList, const c10::List<OptTensor>&)>("edgeless::project");
  return op.call(x, weights, biases);
}

std::vector<Tensor> call_project_backward(const c10::List<OptTensor>& grads, const Tensor& x, at::TensorList weights,
                                          const c10::List<bool>& needs) {
  static const auto op =
      op_of<std::vector<Tensor>(const c10::List<OptTensor>&, const Tensor&, at::TensorList, c10::List<bool>)>(
          "edgeless::project_backward");
  return op.call(grads, x, weights, needs);
}

Tensor call_column_sums(const Tensor& x) {
  static const auto op = op_of<Tensor(const Tensor&)>("edgeless::column_sums");
  return op.call(x);
}

std::vector<Tensor> call_cast_all(at::TensorList tensors, at::ScalarType dtype) {
  static const auto op = op_of<std::vector<Tensor>(at::TensorList, at::ScalarType)>("edgeless::cast_all");
  return op.call(tensors, dtype);
}

// biases: those that are there; has_bias: which maps they belong to.
class Project : public Function<Project> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights, at::TensorList biases,
                               const std::vector<bool>& has_bias) {
    at::AutoDispatchBelowADInplaceOrView guard;
    c10::List<OptTensor> all;
    size_t next = 0;
    for (const bool has : has_bias) all.push_back(has ? OptTensor(biases[next++]) : OptTensor());
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(std::move(saved));
    c10::List<bool> flags;
    for (const bool has : has_bias) flags.push_back(has);
    ctx->saved_data["has_bias"] = std::move(flags);
    ctx->set_materialize_grads(false);
    return call_project(x, weights, all);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const variable_list saved = ctx->get_saved_variables();
    const c10::List<bool> has_bias = ctx->saved_data["has_bias"].toBoolList();
    const size_t maps = saved.size() - 1;
    const Tensor& x = saved[0];
    const at::TensorList weights(saved.data() + 1, maps);
    c10::List<bool> needs;
    for (size_t i = 0; i <= maps; ++i) needs.push_back(ctx->needs_input_grad(i));
    size_t next = 1 + maps;
    for (const bool has : has_bias) needs.push_back(has && ctx->needs_input_grad(next++));
    const variable_list found =
        at::GradMode::is_enabled() ? differentiable(given, x, weights) : below_autograd(given, x, weights, needs);
    variable_list grads;
    for (size_t i = 0; i < found.size(); ++i) {
      if (i <= maps || has_bias[i - 1 - maps]) grads.push_back(needs[i] ? found[i] : Tensor());
    }
    grads.emplace_back();  // of has_bias
    return grads;
  }

 private:
  static variable_list below_autograd(const variable_list& given, const Tensor& x, at::TensorList weights,
                                      const c10::List<bool>& needs) {
    at::AutoDispatchBelowADInplaceOrView guard;
    c10::List<OptTensor> grads;
    for (const Tensor& grad : given) grads.push_back(grad.defined() ? OptTensor(grad) : OptTensor());
    return call_project_backward(grads, x, weights, needs);
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

std::vector<Tensor> project(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
  variable_list present;
  std::vector<bool> has_bias;
  for (size_t k = 0; k < biases.size(); ++k) {
    const OptTensor bias = biases.get(k);
    has_bias.push_back(bias.has_value());
    if (bias) present.push_back(*bias);
  }
  return Project::apply(x, weights, at::TensorList(present), has_bias);
}

class AddRow : public Function<AddRow> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& x, const Tensor& row) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = op_of<Tensor(const Tensor&, const Tensor&)>("edgeless::add_row");
    return op.call(x, row);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0], ctx->needs_input_grad(1) ? call_column_sums(grads[0]) : Tensor()};
  }
};

Tensor add_row(const Tensor& x, const Tensor& row) { return AddRow::apply(x, row); }

class ColumnSums : public Function<ColumnSums> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["rows"] = x.sym_size(0);
    return call_column_sums(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0].expand_symint({ctx->saved_data["rows"].toSymInt(), grads[0].sym_size(0)})};
  }
};

Tensor column_sums(const Tensor& x) { return ColumnSums::apply(x); }

class CastAll : public Function<CastAll> {
 public:
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, at::ScalarType dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    c10::List<int64_t> dtypes;
    for (const Tensor& t : tensors) dtypes.push_back(static_cast<int64_t>(t.scalar_type()));
    ctx->saved_data["dtypes"] = std::move(dtypes);
    ctx->set_materialize_grads(false);
    return call_cast_all(tensors, dtype);
  }

  // One launch for all gradients of one dtype.
  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const c10::List<int64_t> dtypes = ctx->saved_data["dtypes"].toIntList();
    variable_list grads(given.size() + 1);
    std::vector<bool> done(given.size());
    for (size_t first = 0; first < given.size(); ++first) {
      variable_list group;
      std::vector<size_t> which;
      for (size_t i = first; i < given.size(); ++i) {
        if (done[i] || !given[i].defined() || dtypes[i] != dtypes[first] || !ctx->needs_input_grad(i)) continue;
        done[i] = true;
        group.push_back(given[i]), which.push_back(i);
      }
      if (group.empty()) continue;
      const variable_list cast = call_cast_all(group, static_cast<at::ScalarType>(dtypes[first]));
      for (size_t i = 0; i < which.size(); ++i) grads[which[i]] = cast[i];
    }
    return grads;
  }
};

class NodeLogits : public Function<NodeLogits> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList vectors) {
    at::AutoDispatchBelowADInplaceOrView guard;
    variable_list saved{x};
    saved.insert(saved.end(), vectors.begin(), vectors.end());
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    static const auto op = op_of<std::vector<Tensor>(const Tensor&, at::TensorList)>("edgeless::node_logits");
    return op.call(x, vectors);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const variable_list saved = ctx->get_saved_variables();
    const at::TensorList vectors(saved.data() + 1, saved.size() - 1);
    c10::List<bool> needs;
    for (size_t i = 0; i < saved.size(); ++i) needs.push_back(ctx->needs_input_grad(i));
    variable_list grads = at::GradMode::is_enabled() ? differentiable(given, saved[0], vectors)
                                                     : below_autograd(given, saved[0], vectors, needs);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!needs[i]) grads[i] = Tensor();
    }
    return grads;
  }

 private:
  static variable_list below_autograd(const variable_list& given, const Tensor& x, at::TensorList vectors,
                                      const c10::List<bool>& needs) {
    at::AutoDispatchBelowADInplaceOrView guard;
    c10::List<OptTensor> grads;
    for (const Tensor& grad : given) grads.push_back(grad.defined() ? OptTensor(grad) : OptTensor());
    static const auto op =
        op_of<std::vector<Tensor>(const c10::List<OptTensor>&, const Tensor&, at::TensorList, c10::List<bool>)>(
            "edgeless::node_logits_backward");
    return op.call(grads, x, vectors, needs);
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
      grads.push_back((grad * x).sum(0).to(vectors[k].scalar_type()));
    }
    return grads;
  }
};

std::vector<Tensor> node_logits(const Tensor& x, at::TensorList vectors) { return NodeLogits::apply(x, vectors); }

std::vector<Tensor> cast_all(at::TensorList tensors, at::ScalarType dtype) { return CastAll::apply(tensors, dtype); }

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("project", project);
  m.impl("add_row", add_row);
  m.impl("column_sums", column_sums);
  m.impl("cast_all", cast_all);
  m.impl("node_logits", node_logits);
}

}  // namespace edgeless
