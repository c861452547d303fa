// What a test asks for in place of a plan's choice.
#pragma once

#include <string>

namespace edgeless {

// The name of the engine that gradients of extrema on CUDA are to take; empty: the plan chooses.
std::string overridden_gradient_engine();

}  // namespace edgeless
