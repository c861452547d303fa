// A call of a captured model as one autograd node. Python records forward and backward as CUDA graphs
// (shared/capture/model_recording.py). The replay is nearly all that the host does in a step, so it avoids an autograd
// function in Python.
#include "recorded_call.h"

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>

#include <memory>
#include <utility>

#include "../common/autograd.h"

namespace edgeless {
namespace {

namespace py = pybind11;

using Pattern = std::vector<bool>;
using MaybeTensors = std::vector<Optional<Tensor>>;

// The recorded backward for calls in which exactly the outputs in `used` have gradients. replay() reads grad_outputs
// and writes grads.
struct RecordedBackward {
  Pattern used;
  py::object replay;
  variable_list grad_outputs, grads;
};

struct Recorded : torch::CustomClassHolder {
  variable_list inputs, outputs;  // the memory that the graphs read and write
  Pattern differentiable;         // per output
  py::object forward, held;
  std::vector<RecordedBackward> backwards;
  int64_t calls = 0;
  std::weak_ptr<void> pending;  // alive while the backward of the last call may still run

  // May run in an autograd thread, without the GIL.
  ~Recorded() override {
    if (!Py_IsInitialized()) {
      forward.release(), held.release();
      for (auto& backward : backwards) backward.replay.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    forward = held = py::object();
    backwards.clear();
  }

  // The caller holds the GIL.
  variable_list run_forward(at::TensorList given) const {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i].copy_(given[i]);
    forward();
    variable_list copies;
    copies.reserve(outputs.size());
    for (const Tensor& out : outputs) copies.push_back(out.clone());
    return copies;
  }

  // Returns the recorded gradients in memory of their own.
  variable_list run_backward(const variable_list& given) const {
    const RecordedBackward& backward = backward_of(given);
    size_t next = 0;
    for (const Tensor& grad : given) {
      if (grad.defined()) backward.grad_outputs[next++].copy_(grad);
    }
    {
      const py::gil_scoped_acquire gil;
      backward.replay();
    }
    variable_list there;
    for (const Tensor& grad : backward.grads) {
      if (grad.defined()) there.push_back(grad);
    }
    if (!there.empty()) there = at::_foreach_mul(there, 1.0);  // copies all with few launches
    variable_list found(backward.grads.size());
    next = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      if (backward.grads[i].defined()) found[i] = std::move(there[next++]);
    }
    return found;
  }

 private:
  const RecordedBackward& backward_of(const variable_list& given) const {
    for (const RecordedBackward& backward : backwards) {
      bool same = true;
      for (size_t i = 0; i < given.size(); ++i) same = same && backward.used[i] == given[i].defined();
      if (same) return backward;
    }
    TORCH_INTERNAL_ASSERT(false, "capture: no backward is recorded for these outputs");
  }
};

std::vector<int64_t> versions(const c10::List<Tensor>& tensors) {
  std::vector<int64_t> found;
  found.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) found.push_back(static_cast<int64_t>(tensors.get(i)._version()));
  return found;
}

// Returns the gradients such that their differentiation raises the error of PyTorch's once_differentiable.
variable_list with_delayed_errors(const variable_list& grads) {
  const py::gil_scoped_acquire gil;
  const py::module_ functions = py::module_::import("torch").attr("_C").attr("_functions");
  const py::bytes why("trying to differentiate twice a captured call, which is once_differentiable");
  variable_list found;
  for (const Tensor& grad : grads) {
    if (!grad.defined()) {
      found.push_back(grad);
      continue;
    }
    const py::object error = functions.attr("DelayedError")(why, 1);
    found.push_back(error(grad.detach().set_requires_grad(true)).cast<Tensor>());
  }
  return found;
}

struct Replay : torch::autograd::Function<Replay> {
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors,
                               const c10::intrusive_ptr<Recorded>& recorded) {
    const size_t inputs = recorded->inputs.size();
    variable_list outs = recorded->run_forward(tensors.slice(0, inputs));
    const c10::List<Tensor> parameters(tensors.slice(inputs));
    const std::shared_ptr<void> pending = std::make_shared<bool>(true);
    recorded->pending = pending;
    ctx->saved_data["recorded"] = c10::IValue::make_capsule(recorded);
    ctx->saved_data["pending"] = c10::IValue::make_capsule(c10::make_intrusive<Pending>(pending));
    ctx->saved_data["call"] = ++recorded->calls;
    ctx->saved_data["parameters"] = parameters;
    ctx->saved_data["versions"] = versions(parameters);
    ctx->saved_data["tensors"] = static_cast<int64_t>(tensors.size());
    ctx->set_materialize_grads(false);  // an output that no loss uses has no gradient, instead of zeros
    variable_list others;
    for (size_t i = 0; i < outs.size(); ++i) {
      if (!recorded->differentiable[i]) others.push_back(outs[i]);
    }
    ctx->mark_non_differentiable(others);
    return outs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const auto recorded = c10::static_intrusive_pointer_cast<Recorded>(ctx->saved_data.at("recorded").toCapsule());
    TORCH_CHECK(ctx->saved_data.at("call").toInt() == recorded->calls,
                "capture: this backward comes after another forward of the same capture; call backward() once for a "
                "forward, before the next one, or release() the model");
    TORCH_CHECK(
        ctx->saved_data.at("versions").toIntVector() == versions(ctx->saved_data.at("parameters").toTensorList()),
        "capture: a parameter was modified in place between the forward and this backward");
    if (!torch::autograd::get_current_graph_task_keep_graph()) ctx->saved_data.erase("pending");

    const auto tensors = static_cast<size_t>(ctx->saved_data.at("tensors").toInt());
    variable_list grads(tensors + 1);
    bool any = false, differentiable = false;
    for (const Tensor& grad : given) {
      any = any || grad.defined();
      differentiable = differentiable || (grad.defined() && grad.requires_grad());
    }
    if (!any) return grads;
    variable_list found;
    {
      const at::NoGradGuard no_grad;
      found = recorded->run_backward(given);
    }
    if (differentiable && at::GradMode::is_enabled()) found = with_delayed_errors(found);
    size_t next = 0;
    for (size_t i = 0; i < tensors; ++i) {
      if (ctx->needs_input_grad(i)) grads[i] = std::move(found[next++]);
    }
    return grads;
  }

 private:
  struct Pending : torch::CustomClassHolder {
    explicit Pending(std::shared_ptr<void> token) : token(std::move(token)) {}
    std::shared_ptr<void> token;
  };
};

// The Python class.
class RecordedCall {
 public:
  RecordedCall(variable_list inputs, variable_list outputs, Pattern differentiable, py::object forward, py::object held)
      : recorded_(c10::make_intrusive<Recorded>()) {
    recorded_->inputs = std::move(inputs), recorded_->outputs = std::move(outputs);
    recorded_->differentiable = std::move(differentiable);
    recorded_->forward = std::move(forward), recorded_->held = std::move(held);
  }

  void add_backward(Pattern used, py::object replay, variable_list grad_outputs, const MaybeTensors& grads) {
    variable_list all;
    for (const auto& grad : grads) all.push_back(grad.value_or(Tensor()));
    recorded_->backwards.push_back({std::move(used), std::move(replay), std::move(grad_outputs), std::move(all)});
  }

  // parameters: the model's parameters that get gradients.
  variable_list operator()(variable_list moving, const variable_list& parameters) const {
    TORCH_CHECK_VALUE(moving.size() == recorded_->inputs.size(), "capture: the call was recorded with ",
                      recorded_->inputs.size(), " tensors, got ", moving.size());
    if (recorded_->backwards.empty()) return recorded_->run_forward(moving);
    moving.insert(moving.end(), parameters.begin(), parameters.end());
    return Replay::apply(at::TensorList(moving), recorded_);
  }

  bool is_free() const { return recorded_->pending.expired(); }

 private:
  c10::intrusive_ptr<Recorded> recorded_;
};

}  // namespace

void define_recorded_call(py::module_& m) {
  py::class_<RecordedCall>(m, "RecordedCall",
                           "A call whose forward and backward replay what was recorded, as one node of autograd.")
      .def(py::init<variable_list, variable_list, Pattern, py::object, py::object>(), py::kw_only(), py::arg("inputs"),
           py::arg("outputs"), py::arg("differentiable"), py::arg("forward"), py::arg("held"))
      .def("add_backward", &RecordedCall::add_backward, py::arg("used"), py::arg("replay"), py::arg("grad_outputs"),
           py::arg("grads"))
      .def("__call__", &RecordedCall::operator(), py::arg("moving"), py::arg("parameters"))
      .def("is_free", &RecordedCall::is_free);
}

}  // namespace edgeless
