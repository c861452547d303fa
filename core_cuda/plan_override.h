// Lets a test override the planner.
#pragma once

#include <string>

namespace edgeless {

// Name of the engine that computes gradients of extrema on CUDA; empty: the planner chooses.
std::string overridden_gradient_engine();

}  // namespace edgeless
