#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace edgeless {

// Adds the planner's functions to the module, for edgeless.plan (shared/plan.py).
void define_plans(pybind11::module_& m);

#ifdef EDGELESS_WITH_CUDA
// Most bytes of shared memory that a thread block can request on the device.
int64_t shared_bytes_of_block(int device);
#endif

}  // namespace edgeless
