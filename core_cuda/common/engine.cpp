#include "engine.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

namespace edgeless {
namespace {

const Choice& engine_choice() {
  static const Choice choice("edgeless.engine", {"auto", "rowsplit", "cusparse", "cusparse-alg2", "wsb"});
  return choice;
}

const Choice& gradient_choice() {
  static const Choice choice("edgeless.gradient_engine",
                             {kAnyGradientEngine, "gather", "shared_scatter", "cluster_scatter", "scatter"});
  return choice;
}

}  // namespace

Engine chosen_engine() { return static_cast<Engine>(engine_choice().chosen()); }

const std::string& chosen_gradient_engine() { return gradient_choice().names()[gradient_choice().chosen()]; }

OnEngine::OnEngine(Engine engine) {
  if (engine != chosen_engine()) block_ = engine_choice().begin(static_cast<int>(engine));
}

OnEngine::~OnEngine() {
  if (block_) engine_choice().end(*block_);
}

void define_engine_choices(pybind11::module_& m) {
  namespace py = pybind11;
  m.attr("engine_choice") = py::cast(&engine_choice(), py::return_value_policy::reference);
  m.attr("gradient_choice") = py::cast(&gradient_choice(), py::return_value_policy::reference);
}

}  // namespace edgeless
