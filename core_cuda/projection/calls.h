// The projection ops below autograd, for autograd functions that are composed of them.
#pragma once

#include <ATen/ATen.h>

#include "../common/second_derivatives.h"
#include "inputs.h"

namespace edgeless {

using OptTensors = c10::List<OptTensor>;

inline std::vector<Tensor> call_project(const Tensor& x, at::TensorList weights, const OptTensors& biases,
                                        int64_t joined, Optional<at::ScalarType> dtype, at::IntArrayRef heads) {
  static const Kernels kernels("edgeless::project", call_project);
  return kernels(x, weights, biases, joined, dtype, heads);
}

inline std::vector<Tensor> call_project_backward(const OptTensors& grads, const Tensor& x, at::TensorList weights,
                                                 c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                                 Optional<at::ScalarType> map_dtype) {
  static const Kernels kernels("edgeless::project_backward", call_project_backward);
  return kernels(grads, x, weights, std::move(needs), x_dtype, map_dtype);
}

inline Tensor call_project_sum(at::TensorList xs, at::TensorList weights, const OptTensor& bias,
                               Optional<at::ScalarType> dtype) {
  static const Kernels kernels("edgeless::project_sum", call_project_sum);
  return kernels(xs, weights, bias, dtype);
}

inline std::vector<Tensor> call_project_sum_backward(const Tensor& grad, at::TensorList xs, at::TensorList weights,
                                                     c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                                     Optional<at::ScalarType> map_dtype) {
  static const Kernels kernels("edgeless::project_sum_backward", call_project_sum_backward);
  return kernels(grad, xs, weights, std::move(needs), x_dtype, map_dtype);
}

inline void call_project_onto(const Tensor& to, const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  static const Kernels kernels("edgeless::project_onto", call_project_onto);
  kernels(to, x, weight, bias);
}

inline Tensor call_add_row(const Tensor& x, const Tensor& row) {
  static const Kernels kernels("edgeless::add_row", call_add_row);
  return kernels(x, row);
}

inline Tensor call_column_sums(const Tensor& x) {
  static const Kernels kernels("edgeless::column_sums", call_column_sums);
  return kernels(x);
}

inline std::vector<Tensor> call_cast_all(at::TensorList tensors, at::ScalarType dtype, bool side_by_side) {
  static const Kernels kernels("edgeless::cast_all", call_cast_all);
  return kernels(tensors, dtype, side_by_side);
}

inline std::vector<Tensor> call_node_logits(const Tensor& x, at::TensorList vectors) {
  static const Kernels kernels("edgeless::node_logits", call_node_logits);
  return kernels(x, vectors);
}

inline std::vector<Tensor> call_node_logits_backward(const OptTensors& grads, const Tensor& x, at::TensorList vectors,
                                                     c10::List<bool> needs, const OptTensor& more) {
  static const Kernels kernels("edgeless::node_logits_backward", call_node_logits_backward);
  return kernels(grads, x, vectors, std::move(needs), more);
}

inline OptTensors optional(const variable_list& tensors) {
  OptTensors given;
  for (const Tensor& t : tensors) given.push_back(t.defined() ? OptTensor(t) : OptTensor());
  return given;
}

// The biases that exist, and which maps have one.
struct Biases {
  variable_list present;
  std::vector<bool> has;

  explicit Biases(const OptTensors& biases) {
    for (size_t k = 0; k < biases.size(); ++k) {
      const OptTensor bias = biases.get(k);
      has.push_back(bias.has_value());
      if (bias) present.push_back(*bias);
    }
  }
};

// Casts gradients to the dtypes of their inputs, as autocast would, with one launch per dtype.
inline void cast_back(variable_list& tensors, const c10::List<int64_t>& dtypes) {
  const auto cast = [](variable_list group, at::ScalarType dtype) {
    if (!at::GradMode::is_enabled()) return call_cast_all(group, dtype, false);
    for (Tensor& t : group) t = t.to(dtype);
    return group;
  };
  cast_each(tensors, cast, [&](size_t i) { return static_cast<at::ScalarType>(dtypes.get(i)); });
}

// The gradients of maps by differentiable torch ops, in `dtype`.
inline variable_list differentiable_gradients(const variable_list& given, const Tensor& x, const variable_list& weights,
                                              at::ScalarType dtype) {
  Tensor grad_x = at::zeros_like(x, x.options().dtype(dtype));
  variable_list of_weights, of_biases;
  for (size_t k = 0; k < weights.size(); ++k) {
    const Tensor grad =
        given[k].defined() ? given[k].to(dtype) : grad_x.new_zeros_symint({x.sym_size(0), weights[k].sym_size(0)});
    grad_x = grad_x + at::matmul(grad, weights[k].to(dtype));
    of_weights.push_back(at::matmul(grad.t(), x.to(dtype)));
    of_biases.push_back(grad.sum(0));
  }
  variable_list all{grad_x};
  all.insert(all.end(), of_weights.begin(), of_weights.end());
  all.insert(all.end(), of_biases.begin(), of_biases.end());
  return all;
}

// x, weights and biases of maps, the first inputs of an autograd function. `biases` holds the biases that exist;
// has_bias says which maps have one.
struct MapInputs {
  // Forward: the arguments for the op, cast where needed.
  static Maps take(AutogradContext* ctx, const Tensor& x, at::TensorList weights, at::TensorList biases,
                   const std::vector<bool>& has_bias, int64_t joined, Optional<at::ScalarType> dtype) {
    OptTensors all;
    size_t next = 0;
    c10::List<bool> flags;
    for (const bool has : has_bias) all.push_back(has ? OptTensor(biases[next++]) : OptTensor()), flags.push_back(has);
    c10::List<int64_t> dtypes;
    for (const at::TensorList list : {at::TensorList(x), weights, biases}) {
      for (const Tensor& t : list) dtypes.push_back(static_cast<int64_t>(t.scalar_type()));
    }
    ctx->saved_data["has_bias"] = std::move(flags);
    ctx->saved_data["dtypes"] = std::move(dtypes);
    const bool traced = is_traced(x);
    return {x,     weights,
            all,   traced ? 0 : joined,
            dtype, [&](const auto& tensors, at::ScalarType to) { return call_cast_all(tensors, to, !traced); }};
  }

  // Backward: the gradients of the inputs, undefined if not needed. given: gradients of the outputs, [N, F] each.
  static variable_list gradients(AutogradContext* ctx, const variable_list& given, const Tensor& x,
                                 at::TensorList weights) {
    const size_t maps = weights.size();
    const c10::List<bool> has_bias = ctx->saved_data["has_bias"].toBoolList();
    c10::List<bool> needs;
    for (size_t i = 0; i <= maps; ++i) needs.push_back(ctx->needs_input_grad(i));
    size_t next = 1 + maps;
    for (const bool has : has_bias) needs.push_back(has && ctx->needs_input_grad(next++));
    const c10::List<int64_t> dtypes = ctx->saved_data["dtypes"].toIntList();
    const auto dtype = [&](size_t i) { return static_cast<at::ScalarType>(dtypes.get(i)); };
    const auto compute = [&] { return call_project_backward(optional(given), x, weights, needs, dtype(0), dtype(1)); };
    const auto differentiable = [&] {
      return differentiable_gradients(given, with_history(x, 0), with_histories(weights, 1),
                                      at::promote_types(dtype(0), dtype(1)));
    };
    const variable_list found = at::GradMode::is_enabled() ? differentiable() : compute();
    variable_list grads;
    for (size_t i = 0; i < found.size(); ++i) {
      if (i <= maps || has_bias[i - 1 - maps]) grads.push_back(needs[i] ? found[i] : Tensor());
    }
    cast_back(grads, dtypes);
    return grads;
  }
};

// The counterpart of MapInputs for a sum of maps of several inputs: xs, weights and the bias.
struct SumInputs {
  bool has_bias;

  // Forward: the arguments for the op, cast where needed.
  static Summands take(AutogradContext* ctx, at::TensorList xs, at::TensorList weights, const OptTensor& bias,
                       Optional<at::ScalarType> dtype) {
    c10::List<int64_t> dtypes;
    for (const at::TensorList list : {xs, weights}) {
      for (const Tensor& t : list) dtypes.push_back(static_cast<int64_t>(t.scalar_type()));
    }
    if (bias) dtypes.push_back(static_cast<int64_t>(bias->scalar_type()));
    ctx->saved_data["dtypes"] = std::move(dtypes);
    const bool traced = is_traced(xs[0]);
    return {xs, weights, bias, dtype,
            [&](const auto& tensors, at::ScalarType to) { return call_cast_all(tensors, to, !traced); }};
  }

  // Backward of `count` maps.
  SumInputs(const AutogradContext* ctx, size_t count)
      : dtypes_(ctx->saved_data.at("dtypes").toIntList()), count_(count) {
    has_bias = dtypes_.size() > 2 * count;
  }

  // The gradients of the inputs, undefined if not needed. needs: every x, every weight, the bias. With grad mode
  // enabled, xs and weights must carry their autograd history.
  variable_list gradients(const Tensor& grad, at::TensorList xs, at::TensorList weights,
                          const c10::List<bool>& needs) const {
    const auto compute = [&] { return call_project_sum_backward(grad, xs, weights, needs, widest(0), widest(count_)); };
    variable_list grads = at::GradMode::is_enabled() ? differentiable(grad, xs, weights) : compute();
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!needs[i]) grads[i] = Tensor();
    }
    if (!has_bias) grads.pop_back();
    cast_back(grads, dtypes_);
    return grads;
  }

 private:
  // The widest dtype of the inputs, or of the weights.
  at::ScalarType widest(size_t first) const {
    auto widest = static_cast<at::ScalarType>(dtypes_.get(first));
    for (size_t i = first; i < first + count_; ++i) {
      widest = at::promote_types(widest, static_cast<at::ScalarType>(dtypes_.get(i)));
    }
    return widest;
  }

  // The gradients by differentiable torch ops.
  variable_list differentiable(const Tensor& given, at::TensorList xs, at::TensorList weights) const {
    const auto dtype = at::promote_types(widest(0), widest(count_));
    const Tensor grad = given.to(dtype);
    variable_list grads;
    for (const Tensor& weight : weights) grads.push_back(at::matmul(grad, weight.to(dtype)));
    for (const Tensor& x : xs) grads.push_back(at::matmul(grad.t(), x.to(dtype)));
    grads.push_back(grad.sum(0));
    return grads;
  }

  c10::List<int64_t> dtypes_;
  size_t count_;
};

}  // namespace edgeless
