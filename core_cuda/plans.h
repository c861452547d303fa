#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace edgeless {

// Adds attention_plan, fold_plan and gradient_plan to the module: what edgeless.plan prints.
void define_plans(pybind11::module_& m);

#ifdef EDGELESS_WITH_CUDA
// Of shared memory that a block may ask for.
int64_t shared_bytes_of_block(int device);
#endif

}  // namespace edgeless
