#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds SameCall to the module: whether a call of a generated layer may run the program of an earlier one.
void define_same_call(pybind11::module_& m);

}  // namespace edgeless
