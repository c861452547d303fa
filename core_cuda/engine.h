// Which engine computes sums and sampled products: what a user chose for a block of code (shared/engines.py).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "choices.h"

namespace edgeless {

// In the order of their names in engine.cpp.
enum class Engine : int { automatic, rowsplit, cusparse, cusparse_alg2, wsb };

// The choice of the block that this thread is in.
Engine chosen_engine();

// Lets `engine` be the choice of this thread while the object is there, as a block of code does.
class OnEngine {
 public:
  explicit OnEngine(Engine engine);
  ~OnEngine();
  OnEngine(const OnEngine&) = delete;
  OnEngine& operator=(const OnEngine&) = delete;

 private:
  std::shared_ptr<Choice::Block> block_;  // none where it is the choice anyway
};

inline bool is_cusparse(Engine engine) { return engine == Engine::cusparse || engine == Engine::cusparse_alg2; }

// Adds what shared/engines.py tells and asks.
void define_engines(pybind11::module_& m);

}  // namespace edgeless
