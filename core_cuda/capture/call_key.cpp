// Decides whether two calls of a captured model are equal, in the common case that their arguments are plain and
// nothing of the model has changed. shared/capture/keys.py says what has to be equal and why. The checks of every call
// are here, because in Python they take longer than the replay.
#include "call_key.h"

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

namespace edgeless {
namespace {

namespace py = pybind11;

// Arguments -----------------------------------------------------------------------------------------------------------

// Returns whether a tensor may have other values in every call. Tensors of all other dtypes, including 8-bit floats,
// are constants of a recording.
bool is_moving(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16: return true;
    default: return t.is_complex();
  }
}

bool is_plain(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value) || THPDtype_Check(value) || THPSize_Check(value);
}

class CallKey {
 public:
  explicit CallKey(int64_t device) : device_(device) {}

  // Returns false if the value is not plain, so that shared/capture/keys.py must decide.
  bool add(PyObject* value) {
    if (THPVariable_CheckExact(value)) return add_tensor(value);
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
      put(PyTuple_CheckExact(value) ? '(' : '[', size);
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (!add(PySequence_Fast_GET_ITEM(value, i))) return false;
      }
      return true;
    }
    if (PyDict_CheckExact(value)) {
      put('{', PyDict_GET_SIZE(value));
      PyObject *name = nullptr, *part = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &name, &part);) {
        if (!PyUnicode_CheckExact(name)) return false;
        compared_.append(py::handle(name));
        if (!add(part)) return false;
      }
      return true;
    }
    if (!is_plain(value)) return false;
    put('p', Py_TYPE(value));  // the type too, because True == 1 == 1.0
    compared_.append(py::handle(value));
    leaves_.append(py::handle(value));
    return true;
  }

  py::tuple result() const { return py::make_tuple(py::bytes(bytes_), py::tuple(compared_), leaves_); }

 private:
  bool add_tensor(PyObject* value) {
    const at::Tensor& t = THPVariable_Unpack(value);
    if (t.layout() != at::kStrided || t.get_device() != device_ || t.is_inference()) return false;
    if (is_moving(t)) {
      put('m', t.scalar_type(), t.requires_grad(), t.dim());
      for (const int64_t size : t.sizes()) put(size);
      for (const int64_t stride : t.strides()) put(stride);
    } else {
      put('c', value, t._version(), t.data_ptr());
    }
    leaves_.append(py::handle(value));
    return true;
  }

  template <class... T>
  void put(const T&... values) {
    (bytes_.append(reinterpret_cast<const char*>(&values), sizeof(T)), ...);
  }

  int64_t device_;
  std::string bytes_;
  py::list compared_, leaves_;
};

py::object call_key(const py::tuple& args, const py::dict& kwargs, int64_t device) {
  CallKey key(device);
  if (!key.add(args.ptr()) || !key.add(kwargs.ptr())) return py::none();
  return key.result();
}

// The model -----------------------------------------------------------------------------------------------------------

// A snapshot of a dictionary's values, in their order. The references are borrowed: the Python object that owns this
// one also owns the dictionary and the values, because Python's garbage collector cannot see references from here.
class Values {
 public:
  explicit Values(PyObject* of) {
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(of, &at, &name, &value);) now_.push_back(value);
  }

  // Returns whether the dictionary still holds the same objects.
  bool are_in(PyObject* of) const {
    return compare(of, [](size_t, PyObject* before, PyObject* now) { return before == now; });
  }
  // Returns whether the values compare equal, except the one at index `apart`, which is skipped. Throws the
  // error of a comparison that fails.
  bool equal_those_of(PyObject* of, size_t apart = static_cast<size_t>(-1)) const {
    return compare(of, [&](size_t at, PyObject* before, PyObject* now) {
      if (at == apart) return true;
      const int equal = PyObject_RichCompareBool(before, now, Py_EQ);
      if (equal < 0) throw py::error_already_set();
      return equal == 1;
    });
  }

 private:
  template <class F>
  bool compare(PyObject* of, F&& same) const {
    if (static_cast<size_t>(PyDict_Size(of)) != now_.size()) return false;
    size_t next = 0;
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(of, &at, &name, &value); ++next) {
      if (next == now_.size() || !same(next, now_[next], value)) return false;
    }
    return true;
  }

  std::vector<PyObject*> now_;
};

// The checks that State of shared/capture/keys.py makes in every call. The State owns this object and all objects that
// this one points to.
class ModelState {
 public:
  // tables: the dictionaries of parameters, buffers and modules. hooks: the dictionaries that must be empty. inner: the
  // submodules. own: the model's own attributes, of which the one at index `apart` is skipped. tensors: parameters and
  // buffers. matrices: tensors whose sizes and strides count. integers: tensors whose versions count.
  ModelState(const std::vector<py::handle>& tables, const std::vector<py::handle>& hooks,
             const std::vector<py::handle>& inner, py::handle own, size_t apart, const std::vector<py::handle>& tensors,
             const std::vector<py::handle>& matrices, const std::vector<py::handle>& integers)
      : own_(own.ptr()),
        apart_(apart),
        tensors_(pointers(tensors)),
        matrices_(pointers(matrices)),
        integers_(pointers(integers)),
        hooks_(pointers(hooks)) {
    for (const py::handle table : tables) tables_.emplace_back(table.ptr(), Values(table.ptr()));
    for (const py::handle module : inner) {
      inner_.push_back({module.ptr(), Py_TYPE(module.ptr()), Values(dict_of(module.ptr()).ptr())});
    }
    places_of(places_);
    flags_of(flags_);
  }

  bool has_memory() const {
    for (const auto& [table, values] : tables_) {
      if (!values.are_in(table)) return false;
    }
    std::vector<int64_t> places;
    places.reserve(places_.size());
    places_of(places);
    return places == places_;
  }

  bool holds(py::handle own) const {
    for (PyObject* hooks : hooks_) {
      if (PyDict_Size(hooks)) return false;
    }
    if (!has_memory()) return false;
    std::vector<bool> flags;
    flags.reserve(flags_.size());
    flags_of(flags);
    if (flags != flags_) return false;
    try {
      for (const Inner& inner : inner_) {
        if (Py_TYPE(inner.module) != inner.type) return false;
        if (!inner.attributes.equal_those_of(dict_of(inner.module).ptr())) return false;
      }
      return own_.equal_those_of(own.ptr(), apart_);
    } catch (py::error_already_set&) {  // a comparison of two arrays, for instance, which are then different objects
      return false;
    }
  }

 private:
  struct Inner {
    PyObject* module;
    PyTypeObject* type;
    Values attributes;
  };

  static py::object dict_of(PyObject* object) {
    return py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  }
  static std::vector<PyObject*> pointers(const std::vector<py::handle>& objects) {
    std::vector<PyObject*> found;
    for (const py::handle object : objects) found.push_back(object.ptr());
    return found;
  }
  void places_of(std::vector<int64_t>& to) const {
    for (PyObject* t : tensors_) to.push_back(reinterpret_cast<int64_t>(THPVariable_Unpack(t).data_ptr()));
    for (PyObject* matrix : matrices_) {
      const at::Tensor& t = THPVariable_Unpack(matrix);
      to.insert(to.end(), t.sizes().begin(), t.sizes().end());
      to.insert(to.end(), t.strides().begin(), t.strides().end());
    }
    for (PyObject* t : integers_) to.push_back(static_cast<int64_t>(THPVariable_Unpack(t)._version()));
  }
  void flags_of(std::vector<bool>& to) const {
    for (PyObject* t : tensors_) to.push_back(THPVariable_Unpack(t).requires_grad());
  }

  std::vector<std::pair<PyObject*, Values>> tables_;
  std::vector<Inner> inner_;
  Values own_;
  size_t apart_;
  std::vector<PyObject*> tensors_, matrices_, integers_, hooks_;
  std::vector<int64_t> places_;
  std::vector<bool> flags_;
};

}  // namespace

void define_call_key(py::module_& m) {
  m.def("is_moving", &is_moving, py::arg("t"),
        "Whether a tensor, by its dtype, may have other values in every call of a captured model.");
  m.def("call_key", &call_key, py::arg("args"), py::arg("kwargs"), py::arg("device"),
        "(key, what is compared beside it, leaves) of arguments that are plain, else None.");
  py::class_<ModelState>(m, "ModelState",
                         "The modules, parameters and modes of a model at one moment, compared at every call.")
      .def(py::init<const std::vector<py::handle>&, const std::vector<py::handle>&, const std::vector<py::handle>&,
                    py::handle, size_t, const std::vector<py::handle>&, const std::vector<py::handle>&,
                    const std::vector<py::handle>&>(),
           py::kw_only(), py::arg("tables"), py::arg("hooks"), py::arg("inner"), py::arg("own"), py::arg("apart"),
           py::arg("tensors"), py::arg("matrices"), py::arg("integers"))
      .def("has_memory", &ModelState::has_memory)
      .def("holds", &ModelState::holds, py::arg("own"));
}

}  // namespace edgeless
