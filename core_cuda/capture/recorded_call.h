#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds RecordedCall to the module: what edgeless.capture replays.
void define_recorded_call(pybind11::module_& m);

}  // namespace edgeless
