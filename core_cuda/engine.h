// Which engine computes sums and sampled products: what a user chose for a block of code (shared/engines.py).
#pragma once

#include <pybind11/pybind11.h>

namespace edgeless {

// In the order of ENGINES in shared/engines.py.
enum class Engine : int { automatic, rowsplit, cusparse, cusparse_alg2, wsb };

// The choice of this thread or, where it made none, the newest of any thread that still stands: that is how the threads
// of autograd do what their caller asked for.
Engine chosen_engine();

inline bool is_cusparse(Engine engine) { return engine == Engine::cusparse || engine == Engine::cusparse_alg2; }

// Adds what shared/engines.py tells and asks.
void define_engines(pybind11::module_& m);

}  // namespace edgeless
