#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds SameCall, which decides whether a call of a generated layer may run the program of an earlier call, to the
// module.
void define_same_call(pybind11::module_& m);

}  // namespace edgeless
