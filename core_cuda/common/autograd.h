// Shared parts of the ops' autograd. An autograd function runs between an op and the kernels of a device: it calls the
// op again below autograd and saves the tensors that the backward reads. It reads no sizes and has no state outside its
// context, so torch.compile can trace through it. Compiled autograd does not support results without a gradient: a
// function returns these through a pointer argument.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.h"
#include "graph_arrays.h"
#include "optional.h"

namespace edgeless {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The kernels of an op, one per device, with the signature of the function that autograd registers for the op.
template <class Result, class... Args>
class Kernels {
 public:
  Kernels(const char* op, Result (*)(Args...))
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(op, "").template typed<Result(Args...)>()) {}

  Result operator()(Args... args) const {
    at::AutoDispatchBelowADInplaceOrView guard;
    return handle_.call(std::forward<Args>(args)...);
  }

  // Calls the op with autograd and all dispatch keys above it. Used by backwards that can be differentiated: the
  // history of a batched gradient is inside the batch, so the batch must be unpacked before autograd sees it.
  Result op(Args... args) const { return handle_.call(std::forward<Args>(args)...); }

 private:
  c10::TypedOperatorHandle<Result(Args...)> handle_;
};

// Adapts an op function that returns five gradients in a list to one that returns a tuple: torch.compile does not
// support ops that mutate their inputs and return a list.
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <auto function>
struct OneByOne;

template <class... Args, std::vector<Tensor> (*function)(Args...)>
struct OneByOne<function> {
  static FiveTensors call(Args... args) {
    const std::vector<Tensor> found = function(args...);
    return {found[0], found[1], found[2], found[3], found[4]};
  }
};

inline std::vector<Tensor> in_a_list(const FiveTensors& of) {
  return std::apply([](const auto&... t) { return std::vector<Tensor>{t...}; }, of);
}

// Base of all autograd functions here, instead of torch's. T has forward and backward. In any thread and at any time,
// the backward runs with the engine that was chosen when the forward ran.
template <class T>
struct Function : torch::autograd::Function<Function<T>> {
  static constexpr bool is_traceable = true;

  template <class... Args>
  static auto forward(AutogradContext* ctx, Args&&... args) {
    const Engine engine = chosen_engine();
    if (engine != Engine::automatic) ctx->saved_data["engine"] = static_cast<int64_t>(engine);
    return T::forward(ctx, std::forward<Args>(args)...);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->saved_data.find("engine");
    const bool chosen = saved != ctx->saved_data.end();
    const OnEngine as_in_forward(chosen ? static_cast<Engine>(saved->second.toInt()) : Engine::automatic);
    return T::backward(ctx, grads);
  }
};

// Saves tensors, with undefined tensors for missing ones, followed by the arrays of a graph.
inline void save(AutogradContext* ctx, at::ArrayRef<Optional<Tensor>> tensors, const GraphArrays& graph) {
  variable_list all;
  all.reserve(tensors.size() + graph.csr.size() + graph.csc.size());
  for (const auto& t : tensors) all.push_back(t.value_or(Tensor()));
  all.insert(all.end(), graph.csr.begin(), graph.csr.end());
  all.insert(all.end(), graph.csc.begin(), graph.csc.end());
  ctx->saved_data["csr"] = static_cast<int64_t>(graph.csr.size());
  ctx->saved_data["max_degrees"] = at::IntArrayRef(graph.max_degrees).vec();
  ctx->save_for_backward(std::move(all));
}

// Reads the tensors that save() saved; missing tensors are undefined. `count`: the number of tensors before the graph.
class Saved {
 public:
  Saved(const AutogradContext* ctx, size_t count)
      : all_(ctx->get_saved_variables()), graph(graph_behind(ctx, at::TensorList(all_).slice(count))) {}

  const Tensor& operator[](size_t i) const { return all_[i]; }

  Optional<Tensor> optional(size_t i) const {
    return all_[i].defined() ? Optional<Tensor>(all_[i]) : Optional<Tensor>();
  }

 private:
  static GraphArrays graph_behind(const AutogradContext* ctx, at::TensorList arrays) {
    const auto size = static_cast<size_t>(ctx->saved_data.at("csr").toInt());
    return {arrays.slice(0, size), arrays.slice(size), ctx->saved_data.at("max_degrees").toIntVector()};
  }

  variable_list all_;

 public:
  const GraphArrays graph;
};

// True under a tracer (Python dispatch or functionalization), which may treat every result of an op as a tensor with
// memory of its own.
inline bool is_traced(const Tensor& t) {
  return t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

// Tells whether an input needs a gradient. To be called once per input, in order: autograd counts only the inputs that
// were given.
class Needs {
 public:
  explicit Needs(const AutogradContext* ctx) : ctx_(ctx) {}

  bool operator()(bool given = true) { return given && ctx_->needs_input_grad(next_++); }

 private:
  const AutogradContext* ctx_;
  size_t next_ = 0;
};

// True if a tensor represents a batch of tensors (batched.cpp) and has no storage.
inline bool is_batched(const Tensor& t) {
  return t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
}

// Reshape [N, H, C] to [N, H * C] and back by ops with batching rules, which flatten and unflatten lack.
inline Tensor heads_joined(const Tensor& t) { return t.reshape_symint({t.sym_size(0), t.sym_size(1) * t.sym_size(2)}); }
inline Tensor heads_apart(const Tensor& t, const c10::SymInt& heads, const c10::SymInt& channels) {
  return t.view_symint({t.sym_size(0), heads, channels});
}

}  // namespace edgeless
