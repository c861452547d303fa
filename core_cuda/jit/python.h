// Python bindings of the kernels that are compiled at run time.
#pragma once

#include <pybind11/pybind11.h>

namespace edgeless::jit {

void define_jit(pybind11::module_& m);

}  // namespace edgeless::jit
