#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds call_key() and ModelState, by which edgeless.capture distinguishes calls, to the module.
void define_call_key(pybind11::module_& m);

}  // namespace edgeless
