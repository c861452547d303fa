#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds call_key() and ModelState to the module: how edgeless.capture tells calls apart.
void define_call_key(pybind11::module_& m);

}  // namespace edgeless
