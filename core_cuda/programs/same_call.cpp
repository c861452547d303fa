// Decides whether the program of an earlier call of a layer computes this call too. The key of a program
// (shared/programs/keys.py) reads hundreds of Python objects. The code here compares the values that the key has read
// with the present ones, by identity, which takes a few microseconds: if nothing has changed, the key would be the
// same. If something has changed, or if the call is not a plain one, the key decides.
#include "same_call.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace edgeless {
namespace {

namespace py = pybind11;

// The properties that a tensor must share to be treated in the same way. The number of its rows may differ.
struct Form {
  explicit Form(const at::Tensor& t)
      : dtype(t.scalar_type()), device(t.device()), requires_grad(t.requires_grad()), sizes(t.sizes().vec()) {}

  bool fits(const at::Tensor& t, int64_t row_dim) const {
    if (t.scalar_type() != dtype || t.device() != device || t.requires_grad() != requires_grad) return false;
    if (t.layout() != at::kStrided || t.is_nested() || t.dim() != static_cast<int64_t>(sizes.size())) return false;
    for (int64_t d = 0; d < t.dim(); ++d) {
      if (d != row_dim && t.size(d) != sizes[d]) return false;
    }
    return true;
  }

  at::ScalarType dtype;
  at::Device device;
  bool requires_grad;
  std::vector<int64_t> sizes;
};

const at::Tensor* tensor_of(PyObject* object) {
  return THPVariable_CheckExact(object) ? &THPVariable_Unpack(object) : nullptr;
}

// The dtype to which autocast rounds on a device, or none. torch renamed these functions in 2.4.
std::optional<at::ScalarType> rounding(at::DeviceType device) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 4
  if (!at::autocast::is_autocast_enabled(device)) return {};
  return at::autocast::get_autocast_dtype(device);
#else
  if (device == at::kCPU) {
    if (!at::autocast::is_cpu_enabled()) return {};
    return at::autocast::get_autocast_cpu_dtype();
  }
  if (!at::autocast::is_enabled()) return {};
  return at::autocast::get_autocast_gpu_dtype();
#endif
}

// The state of torch that decides what runs.
struct Modes {
  explicit Modes(at::DeviceType device)
      : grad(at::GradMode::is_enabled()), rounds_to(rounding(device)), floats(at::get_default_dtype_as_scalartype()) {}
  bool operator==(const Modes& other) const {
    return grad == other.grad && rounds_to == other.rounds_to && floats == other.floats;
  }

  bool grad;
  std::optional<at::ScalarType> rounds_to;
  at::ScalarType floats;
};

// An object that the key has read, and the value found. References are borrowed: the Python object that owns a SameCall
// holds all of them, because Python's garbage collector cannot see references from here.
class Note {
 public:
  Note(const std::string& kind, py::handle object, py::handle a, py::handle b)
      : kind_(kind[0]), object_(object.ptr()), a_(a.ptr()), b_(b.ptr()) {
    if (kind == "dict") {
      PyObject *name = nullptr, *value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(object_, &at, &name, &value);) items_.emplace_back(name, value);
    } else if (kind == "list") {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object_); ++i)
        items_.emplace_back(nullptr, PyList_GET_ITEM(object_, i));
    } else if (kind == "tensor") {
      form_.emplace(THPVariable_Unpack(object_));
    }
  }

  bool holds() const {
    switch (kind_) {
      case 'd': return dict_holds();
      case 'l': return list_holds();
      case 's': return PyObject_RichCompareBool(object_, a_, Py_EQ) == 1;
      case 't': return form_->fits(THPVariable_Unpack(object_), -1);
      case 'o': return object_holds();
      case 'c': return PyCell_GET(object_) == (a_ == Py_Ellipsis ? nullptr : a_);
      case 'i': return same(item(), b_ == Py_Ellipsis ? nullptr : b_);
      default: return same(PyObject_GetAttr(object_, a_), b_);
    }
  }

 private:
  static bool same(PyObject* now, PyObject* before) {
    if (now == nullptr) PyErr_Clear();
    Py_XDECREF(now);
    return now == before;
  }
  PyObject* item() const {
    if (!PyDict_CheckExact(object_)) return PyObject_GetItem(object_, a_);
    PyObject* found = PyDict_GetItemWithError(object_, a_);
    Py_XINCREF(found);
    return found;
  }
  bool object_holds() const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object_)) != b_) return false;
    return same(PyObject_GenericGetDict(object_, nullptr), a_);
  }
  bool dict_holds() const {
    if (static_cast<size_t>(PyDict_Size(object_)) != items_.size()) return false;
    size_t next = 0;
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(object_, &at, &name, &value); ++next) {
      if (next == items_.size() || items_[next].first != name || items_[next].second != value) return false;
    }
    return true;
  }
  bool list_holds() const {
    if (static_cast<size_t>(PyList_GET_SIZE(object_)) != items_.size()) return false;
    for (size_t i = 0; i < items_.size(); ++i) {
      if (PyList_GET_ITEM(object_, i) != items_[i].second) return false;
    }
    return true;
  }

  char kind_;
  PyObject *object_, *a_, *b_;
  std::vector<std::pair<PyObject*, PyObject*>> items_;
  std::optional<Form> form_;
};

// The rows of a tensor: none, one per node of row 0 or 1 of edge_index (row 0 if both have the same nodes), or per
// edge.
enum Rows : int { kNone, kFirst, kSecond, kEdges };

class SameCall {
 public:
  // notes: (kind, object, a, b). given: name -> form of an argument, which is ("tensor", index), ("constant", value) or
  // (type, forms of its parts). tensors: all tensors of the call, those of the layer from index `own` on. kept: the
  // same, with placeholders before `own`. rows: (Rows, dimension) of each tensor. sizes: for each row of edge_index,
  // whether the argument `size` gives the number of nodes. one_set: both rows of edge_index have the same nodes.
  SameCall(const std::vector<std::tuple<std::string, py::handle, py::handle, py::handle>>& notes, py::handle given,
           py::handle edge_index, const std::vector<py::handle>& tensors, const std::vector<py::handle>& kept,
           size_t own, const std::vector<std::pair<int, int64_t>>& rows, std::pair<bool, bool> sizes, bool one_set)
      : given_(given.ptr()),
        edges_(THPVariable_Unpack(edge_index.ptr())),
        modes_(edges_.device.type()),
        own_(own),
        rows_(rows),
        told_{sizes.first, sizes.second},
        one_set_(one_set) {
    for (const auto& [kind, object, a, b] : notes) notes_.emplace_back(kind, object, a, b);
    for (const py::handle tensor : kept) tensors_.push_back(tensor.ptr());
    for (const py::handle tensor : tensors) forms_.emplace_back(THPVariable_Unpack(tensor.ptr()));
  }

  // Returns the call's tensors and the numbers of nodes of both rows of edge_index, or None if the key has to decide.
  py::object match(py::handle edge_index, const py::dict& kwargs) const {
    const at::Tensor* ends = tensor_of(edge_index.ptr());
    if (!ends || !edges_.fits(*ends, 1) || !(Modes(edges_.device.type()) == modes_)) return py::none();
    if (c10::InferenceMode::is_enabled() || torch::jit::tracer::isTracing()) return py::none();
    int64_t counts[2] = {-1, -1};
    PyObject* size = PyDict_GetItemString(kwargs.ptr(), "size");
    if (!read_sizes(size ? size : Py_None, counts)) return py::none();
    std::vector<PyObject*> found(tensors_);
    if (static_cast<size_t>(PyDict_Size(given_)) + (size != nullptr) != kwargs.size()) return py::none();
    PyObject *name = nullptr, *form = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(given_, &at, &name, &form);) {
      PyObject* value = PyDict_GetItemWithError(kwargs.ptr(), name);
      if (value == nullptr || !fits(form, value, found)) return py::none();
    }
    if (!count(found, ends->size(1), counts)) return py::none();
    for (const Note& note : notes_) {
      if (!note.holds()) {
        PyErr_Clear();
        return py::none();
      }
    }
    py::list tensors(found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      Py_INCREF(found[i]);
      PyList_SET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i), found[i]);
    }
    return py::make_tuple(tensors, counts[0], counts[1]);
  }

 private:
  bool read_sizes(PyObject* size, int64_t (&counts)[2]) const {
    if (size == Py_None) return !told_[0] && !told_[1];
    if (!PyTuple_CheckExact(size) || PyTuple_GET_SIZE(size) != 2) return false;
    for (int row = 0; row < 2; ++row) {
      PyObject* number = PyTuple_GET_ITEM(size, row);
      if (told_[row] != (number != Py_None)) return false;
      if (!told_[row]) continue;
      if (!PyLong_CheckExact(number)) return false;
      counts[row] = PyLong_AsLongLong(number);
      if (counts[row] < 1) {  // or more than 64 bits
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  static bool fits(PyObject* form, PyObject* value, std::vector<PyObject*>& found) {
    PyObject *kind = PyTuple_GET_ITEM(form, 0), *what = PyTuple_GET_ITEM(form, 1);
    if (PyUnicode_Check(kind)) {
      if (PyUnicode_READ_CHAR(kind, 0) == 't') {
        if (tensor_of(value) == nullptr) return false;
        found[PyLong_AsSize_t(what)] = value;
        return true;
      }
      if (what == value) return true;
      if (Py_TYPE(what) != Py_TYPE(value)) return false;
      if (!PyLong_CheckExact(what) && !PyFloat_CheckExact(what) && !PyUnicode_CheckExact(what)) return false;
      return PyObject_RichCompareBool(what, value, Py_EQ) == 1;
    }
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != kind || !(PyTuple_Check(value) || PyList_Check(value)))
      return false;
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    if (size != PyList_GET_SIZE(what)) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!fits(PyList_GET_ITEM(what, i), PySequence_Fast_GET_ITEM(value, i), found)) return false;
    }
    return true;
  }

  // Returns whether every tensor has its earlier form and kind of rows. The numbers of nodes and edges may differ;
  // those of nodes are written to `counts`.
  bool count(const std::vector<PyObject*>& found, int64_t edges, int64_t (&counts)[2]) const {
    for (size_t i = 0; i < found.size(); ++i) {
      const at::Tensor& t = THPVariable_Unpack(found[i]);
      const auto& [rows, dim] = rows_[i];
      if (!forms_[i].fits(t, rows == kNone ? -1 : dim) || (modes_.grad && t.is_inference())) return false;
      if (rows == kEdges && t.size(dim) != edges) return false;
      if (rows != kFirst && rows != kSecond) continue;
      for (int row = 0; row < 2; ++row) {
        if (!one_set_ && row != (rows == kSecond)) continue;
        if (counts[row] >= 0 && counts[row] != t.size(dim)) return false;
        counts[row] = t.size(dim);
      }
    }
    if (counts[0] < 1 || counts[1] < 1 || edges < 1 || (counts[0] == counts[1]) != one_set_) return false;
    if (edges == counts[0] || edges == counts[1]) return false;
    for (size_t i = 0; i < own_; ++i) {  // a tensor without rows must not look like one with rows
      const at::Tensor& t = THPVariable_Unpack(found[i]);
      if (rows_[i].first != kNone || t.dim() == 0) continue;
      if (t.size(0) == edges || t.size(0) == counts[0] || t.size(0) == counts[1]) return false;
    }
    return true;
  }

  PyObject* given_;
  Form edges_;
  Modes modes_;
  size_t own_;
  std::vector<std::pair<int, int64_t>> rows_;
  bool told_[2];
  bool one_set_;
  std::vector<Note> notes_;
  std::vector<PyObject*> tensors_;
  std::vector<Form> forms_;
};

}  // namespace

void define_same_call(py::module_& m) {
  py::class_<SameCall>(m, "SameCall", "What the key of a program was made of, compared at every call.")
      .def(py::init<const std::vector<std::tuple<std::string, py::handle, py::handle, py::handle>>&, py::handle,
                    py::handle, const std::vector<py::handle>&, const std::vector<py::handle>&, size_t,
                    const std::vector<std::pair<int, int64_t>>&, std::pair<bool, bool>, bool>(),
           py::kw_only(), py::arg("notes"), py::arg("given"), py::arg("edge_index"), py::arg("tensors"),
           py::arg("kept"), py::arg("own"), py::arg("rows"), py::arg("sizes"), py::arg("one_set"))
      .def("match", &SameCall::match, py::arg("edge_index"), py::arg("kwargs"));
}

}  // namespace edgeless
