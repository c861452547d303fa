#include "python.h"

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "launch.h"

namespace edgeless::jit {
namespace {

namespace py = pybind11;

// provide(header, expression, architecture) -> (bytes of the image, mangled name); prepare([(header, expression), ...],
// architecture). Both functions are never released, since kernels may be launched while the interpreter ends.
void set_python_provider(py::function provide, py::function prepare) {
  PyObject *const provides = provide.release().ptr(), *const prepares = prepare.release().ptr();
  set_provider(
      [provides](const KernelName& name, int architecture) {
        const py::gil_scoped_acquire gil;
        const py::object found = py::handle(provides)(name.header, name.expression, architecture);
        const auto code = found.cast<std::pair<py::bytes, std::string>>();
        return Code{code.first, code.second};
      },
      [prepares](const std::vector<KernelName>& names, int architecture) {
        const py::gil_scoped_acquire gil;
        py::list kernels;
        for (const KernelName& name : names) kernels.append(py::make_tuple(name.header, name.expression));
        const py::object nothing = py::handle(prepares)(kernels, architecture);
      });
}

// Returns a copy that lives forever, the same for equal texts. Guarded by the GIL.
const char* kept_text(const std::string& text) {
  static auto* const all = new std::unordered_set<std::string>;
  return all->insert(text).first->c_str();
}

// arguments: the bytes of each of the kernel's parameters.
void launch_by_name(const std::string& header, const std::string& expression, std::array<uint32_t, 3> grid,
                    uint32_t block, std::vector<std::string> arguments, int64_t shared_bytes, int cluster,
                    bool cooperative, uintptr_t stream) {
  const Expression kernel(kept_text(header), kept_text(expression));
  const py::gil_scoped_release no_gil;
  std::vector<void*> values;
  std::vector<size_t> sizes;
  for (std::string& argument : arguments) {
    values.push_back(argument.data());
    sizes.push_back(argument.size());
  }
  const Queue queue{reinterpret_cast<Stream>(stream), Driver::get().current_device()};
  const Shape shape{{grid[0], grid[1], grid[2]}, block, shared_bytes, cluster, cooperative};
  launch_with(queue, kernel, shape, values.data(), sizes.data(), static_cast<int>(sizes.size()));
}

}  // namespace

void define_jit(py::module_& m) {
  m.def("set_kernel_provider", &set_python_provider, py::arg("provide"), py::arg("prepare"));
  m.def("launch_kernel", &launch_by_name, py::kw_only(), py::arg("header"), py::arg("expression"), py::arg("grid"),
        py::arg("block"), py::arg("arguments"), py::arg("shared_bytes"), py::arg("cluster"), py::arg("cooperative"),
        py::arg("stream"));
}

}  // namespace edgeless::jit
