// Second and higher derivatives. Kernels always compute the first gradients of an op. Under create_graph these become
// the results of an autograd node, which saves the op's inputs and the gradients of its results. The backward of that
// node recomputes the op by its plain form, which consists of differentiable PyTorch ops and materializes edge tensors,
// and lets autograd differentiate the plain form twice.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <initializer_list>

#include "autograd.h"

namespace edgeless {

// The plain form of an op: its results as a function of its inputs; missing inputs are undefined tensors.
using Plain = std::function<variable_list(const variable_list& inputs)>;

// Restores the autograd history of input `i` of the current node, counted among the given inputs. `saved` may be a copy
// that the forward made for another dtype or other strides, which has no history.
inline Tensor with_history(const Tensor& saved, size_t i) {
  if (!at::GradMode::is_enabled() || saved.requires_grad()) return saved;
  const auto edge = torch::autograd::get_current_node()->next_edge(i);
  if (!edge.is_valid()) return saved;
  Tensor copy = saved.variable_data();
  torch::autograd::impl::set_gradient_edge(copy, edge);
  return copy;
}

// with_history() for consecutive inputs from index `first` on.
inline variable_list with_histories(at::TensorList saved, size_t first) {
  variable_list all;
  for (const Tensor& t : saved) all.push_back(with_history(t, first + all.size()));
  return all;
}

// Returns `value` with the derivatives of `function`, whose value must equal it up to rounding.
inline Tensor with_derivatives_of(const Tensor& value, const Tensor& function) {
  return value + (function - function.detach());
}

struct KernelGradients : torch::autograd::Function<KernelGradients> {
  static constexpr bool is_traceable = true;

  struct KeptPlain : torch::CustomClassHolder {
    explicit KeptPlain(Plain function) : function(std::move(function)) {}
    Plain function;
  };

  // Arguments that bypass autograd. all: the inputs, then the gradients of the results, undefined where missing;
  // places: output, the indices of the inputs whose gradients compute() returned.
  struct Call {
    const variable_list& all;
    size_t inputs;
    const Plain& plain;
    const std::function<variable_list()>& compute;
    std::vector<int64_t>& places;
  };

  static variable_list forward(AutogradContext* ctx, at::TensorList /*given*/, const Call& call) {
    variable_list results = call.compute(), found;
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].defined()) found.push_back(std::move(results[i])), call.places.push_back(static_cast<int64_t>(i));
    }
    ctx->save_for_backward(call.all);
    ctx->saved_data["inputs"] = static_cast<int64_t>(call.inputs);
    ctx->saved_data["places"] = call.places;
    ctx->saved_data["plain"] = c10::IValue::make_capsule(c10::make_intrusive<KeptPlain>(call.plain));
    ctx->set_materialize_grads(false);
    return found;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const bool again = at::GradMode::is_enabled();
    const at::AutoGradMode with_graph(true);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto count = static_cast<size_t>(ctx->saved_data.at("inputs").toInt());
    const std::vector<int64_t> places = ctx->saved_data.at("places").toIntVector();
    // Makes every tensor a separate node: else the gradient of an input would include paths through other tensors that
    // are computed from this input.
    variable_list all = ctx->get_saved_variables();
    for (Tensor& t : all) {
      if (t.defined() && t.requires_grad()) t = t.view_as(t);
    }
    variable_list of, grads_of;
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i].defined()) continue;
      Tensor& input = all[places[i]];
      if (!input.requires_grad()) input = input.detach().requires_grad_();
      of.push_back(input), grads_of.push_back(given[i]);
    }
    const auto kept = ctx->saved_data.at("plain").toCapsule();
    const Plain& plain = static_cast<const KeptPlain&>(*kept).function;
    const variable_list results = plain({all.begin(), all.begin() + static_cast<int64_t>(count)});
    const variable_list first = gradients(results, {all.begin() + static_cast<int64_t>(count), all.end()}, of, true);

    variable_list sources;
    std::vector<size_t> which;
    size_t next = 0;
    for (const Tensor& t : all) {
      if (!t.defined()) continue;
      if (ctx->needs_input_grad(next)) sources.push_back(t), which.push_back(next);
      ++next;
    }
    const variable_list second = gradients(first, grads_of, sources, again);
    variable_list found(next + 1);  // one more for the Call argument
    for (size_t i = 0; i < which.size(); ++i) found[which[i]] = second[i];
    return found;
  }

 private:
  // A gradient is undefined if `results`, some of which may be undefined, do not depend on its source.
  static variable_list gradients(const variable_list& results, const variable_list& grads, const variable_list& sources,
                                 bool create_graph) {
    variable_list from, given;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].defined() || !results[i].requires_grad() || !grads[i].defined()) continue;
      from.push_back(results[i]), given.push_back(grads[i].to(results[i].scalar_type()));
    }
    if (from.empty() || sources.empty()) return variable_list(sources.size());
    return torch::autograd::grad(from, sources, given, create_graph, create_graph, /*allow_unused=*/true);
  }
};

inline variable_list with_plain_form(const variable_list& inputs, const variable_list& grads, const Plain& plain,
                                     const std::function<variable_list()>& compute) {
  variable_list all = inputs, given;
  all.insert(all.end(), grads.begin(), grads.end());
  for (const Tensor& t : all) {
    if (t.defined()) given.push_back(t);
    TORCH_CHECK(
        !t.defined() || !is_batched(t),
        "edgeless: a batch of gradients (is_grads_batched, vectorize=True) cannot be made with "
        "create_graph=True; take its gradients one by one, or run under `with edgeless.backend(\"reference\")`");
  }
  variable_list results;
  std::vector<int64_t> places;
  const std::function<variable_list()> counted = [&] {
    variable_list found = compute();
    results.resize(found.size());
    return found;
  };
  const variable_list found =
      KernelGradients::apply(at::TensorList(given), KernelGradients::Call{all, inputs.size(), plain, counted, places});
  for (size_t i = 0; i < found.size(); ++i) results[places[i]] = found[i];
  return results;
}

// Returns compute(), the gradients with respect to the inputs, in order, for the gradients `grads` of the results;
// under create_graph they are differentiable through the plain form that make_plain() returns. Missing inputs and grads
// are undefined. The plain form must not hold tensors that other code may write to.
template <class MakePlain, class Compute>
variable_list differentiable_again(std::initializer_list<Optional<Tensor>> inputs, const variable_list& grads,
                                   const MakePlain& make_plain, const Compute& compute) {
  if (!at::GradMode::is_enabled()) return compute();
  variable_list given;
  for (const auto& t : inputs) given.push_back(t.value_or(Tensor()));
  return with_plain_form(given, grads, make_plain(), compute);
}

}  // namespace edgeless
