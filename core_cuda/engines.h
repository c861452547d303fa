// What Python asks of the engines (shared/choices/engines.py): the choices, why an engine cannot run a call, and what
// graphs keep for engines.
#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

void define_engines(pybind11::module_& m);

}  // namespace edgeless
