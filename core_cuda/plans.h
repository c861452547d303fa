#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// Adds attention_plan, fold_plan and gradient_plan to the module: what edgeless.plan prints.
void define_plans(pybind11::module_& m);

}  // namespace edgeless
