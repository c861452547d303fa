#include "python.h"

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"

namespace edgeless::jit {
namespace {

namespace py = pybind11;

// provide(header, expression, architecture) -> (bytes of the image, mangled name). It is never released: kernels may be
// launched while the interpreter ends.
void set_python_provider(py::function provide) {
  PyObject* const kept = provide.release().ptr();
  set_provider([kept](const KernelName& name, int architecture) {
    const py::gil_scoped_acquire gil;
    const py::object found = py::handle(kept)(name.header, name.expression, architecture);
    const auto code = found.cast<std::pair<py::bytes, std::string>>();
    return Code{code.first, code.second};
  });
}

uint64_t key_of(const KernelName& name) {
  static auto* const numbers = new std::unordered_map<std::string, uint64_t>;  // guarded by the GIL
  return numbers->try_emplace(name.header + ": " + name.expression, numbers->size()).first->second;
}

// arguments: the bytes of each of the kernel's parameters.
void launch_by_name(const std::string& header, const std::string& expression, std::array<uint32_t, 3> grid,
                    uint32_t block, std::vector<std::string> arguments, uint32_t dynamic_shared_bytes, uint32_t cluster,
                    bool cooperative, uintptr_t stream) {
  const KernelName name{header, expression};
  const uint64_t key = key_of(name);
  const py::gil_scoped_release no_gil;
  Launch launch{{grid[0], grid[1], grid[2]},     block, dynamic_shared_bytes, cluster, cooperative,
                reinterpret_cast<Stream>(stream)};
  std::vector<void*> values;
  for (std::string& argument : arguments) values.push_back(argument.data());
  const Function function = function_of("Python", key, launch.stream, [&] { return name; });
  constexpr uint32_t kUsualSharedBytes = 48 << 10;
  if (dynamic_shared_bytes > kUsualSharedBytes) {
    Driver::get().allow_shared_bytes(function, static_cast<int>(dynamic_shared_bytes));
  }
  Driver::get().launch(function, launch, values.data());
}

}  // namespace

void define_jit(py::module_& m) {
  m.def("set_kernel_provider", &set_python_provider, py::arg("provide"));
  m.def("launch_kernel", &launch_by_name, py::kw_only(), py::arg("header"), py::arg("expression"), py::arg("grid"),
        py::arg("block"), py::arg("arguments"), py::arg("dynamic_shared_bytes"), py::arg("cluster"),
        py::arg("cooperative"), py::arg("stream"));
}

}  // namespace edgeless::jit
