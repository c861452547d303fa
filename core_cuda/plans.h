#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds the planner's functions to the module, for edgeless.plan (shared/plan/steps.py).
void define_plans(pybind11::module_& m);
void define_kernel_plans(pybind11::module_& m);

}  // namespace edgeless
