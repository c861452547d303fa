// What Python has of the kernels that are compiled where they run.
#pragma once

#include <pybind11/pybind11.h>

namespace edgeless::jit {

void define_jit(pybind11::module_& m);

}  // namespace edgeless::jit
