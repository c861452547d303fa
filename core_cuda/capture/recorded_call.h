#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds RecordedCall, a call that edgeless.capture replays, to the module.
void define_recorded_call(pybind11::module_& m);

}  // namespace edgeless
