#include "decisions.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

namespace edgeless {
namespace {

namespace py = pybind11;

std::atomic<int64_t> num_decided{0};  // entries of all graphs

OpShape shape_of(const std::string& op, const py::object& dtype, int64_t width, bool weighted) {
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "edgeless: dtype must be a torch.dtype");
  return {op, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, width, weighted};
}

}  // namespace

Decisions::~Decisions() {
  num_decided -= num_entries();
  for (const Entry& entry : entries_) {
    OwnersByArrays<Decisions>::get().remove({place_of(entry.indptr, entry.indices)}, this);
  }
}

void Decisions::decide(const at::Tensor& indptr, const at::Tensor& indices, OpShape shape, Decision decision) {
  if (of({indptr, indices}, shape)) return;
  {
    const std::lock_guard lock(mutex_);
    entries_.push_back({indptr, indices, std::move(shape), std::move(decision)});
  }
  OwnersByArrays<Decisions>::get().add({place_of(indptr, indices)}, shared_from_this());
  ++num_decided;
}

std::optional<Decision> Decisions::of(at::TensorList csr, const OpShape& shape) const {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    const bool same = place_of(entry.indptr, entry.indices) == place_of(csr[0], csr[1]) &&
                      entry.indptr.sizes() == csr[0].sizes() && entry.indices.sizes() == csr[1].sizes();
    if (same && entry.shape == shape) return entry.decision;
  }
  return std::nullopt;
}

int64_t Decisions::num_entries() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(entries_.size());
}

std::optional<Decision> decision_for(at::TensorList csr, const OpShape& shape) {
  const auto kept = OwnersByArrays<Decisions>::get().find(place_of(csr[0], csr[1]));
  return kept ? kept->of(csr, shape) : std::nullopt;
}

Engine decided_engine(Engine chosen, at::TensorList csr, const char* op, at::ScalarType dtype, int64_t width,
                      bool weighted, int64_t head_dim) {
  if (chosen != Engine::automatic || num_decided.load(std::memory_order_relaxed) == 0) return chosen;
  const std::string name = head_dim ? op + std::to_string(head_dim) : op;
  const auto decision = decision_for(csr, {name, dtype, width, weighted});
  return decision ? decision->engine : chosen;
}

void define_decisions(py::module_& m) {
  py::class_<Decisions, std::shared_ptr<Decisions>>(m, "Decisions")
      .def(py::init(&Decisions::make))
      .def(
          "decide",
          [](Decisions& decisions, const at::Tensor& indptr, const at::Tensor& indices, const std::string& op,
             const py::object& dtype, int64_t width, bool weighted, int engine, const std::string& origin) {
            decisions.decide(indptr, indices, shape_of(op, dtype, width, weighted),
                             {static_cast<Engine>(engine), origin});
          },
          py::arg("indptr"), py::arg("indices"), py::arg("op"), py::arg("dtype"), py::arg("width"), py::arg("weighted"),
          py::arg("engine"), py::arg("origin"))
      .def("kept_tensors", [](const Decisions&) { return std::vector<at::Tensor>(); })
      .def("num_entries", &Decisions::num_entries);
  m.def(
      "decision",
      [](const std::vector<at::Tensor>& csr, const std::string& op, const py::object& dtype, int64_t width,
         bool weighted) -> std::optional<std::pair<int, std::string>> {
        const auto found = decision_for(csr, shape_of(op, dtype, width, weighted));
        if (!found) return std::nullopt;
        return std::pair(static_cast<int>(found->engine), found->origin);
      },
      py::arg("csr"), py::arg("op"), py::arg("dtype"), py::arg("width"), py::arg("weighted"));
}

}  // namespace edgeless
