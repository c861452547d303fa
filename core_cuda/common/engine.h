// The engine that a user chose for a block of code (shared/choices/engines.py).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "choices.h"

namespace edgeless {

// The order is that of the names in engine.cpp.
enum class Engine : int { automatic, rowsplit, cusparse, cusparse_alg2, wsb };

// Returns the calling thread's choice.
Engine chosen_engine();

// The name of the algorithm for gradients of extrema on CUDA (reduction/cuda/plan.h) that a test chose for a block of
// code. kAnyGradientEngine: the plan chooses.
constexpr const char* kAnyGradientEngine = "auto";
const std::string& chosen_gradient_engine();

// Makes `engine` the calling thread's choice for the lifetime of the object, as a `with` block does.
class OnEngine {
 public:
  explicit OnEngine(Engine engine);
  ~OnEngine();
  OnEngine(const OnEngine&) = delete;
  OnEngine& operator=(const OnEngine&) = delete;

 private:
  std::shared_ptr<Choice::Block> block_;  // null if `engine` was the choice already
};

inline bool is_cusparse(Engine engine) { return engine == Engine::cusparse || engine == Engine::cusparse_alg2; }

// Adds the choices of engines to the module, for shared/choices/engines.py.
void define_engine_choices(pybind11::module_& m);

}  // namespace edgeless
