// The engines for Python (shared/choices/engines.py): the choices, the reasons why an engine cannot run a call, and the
// data that graphs hold for engines.
#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

void define_engines(pybind11::module_& m);

}  // namespace edgeless
