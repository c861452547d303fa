// Engines that were measured to be the fastest for an op on one direction of a graph (shared/choices/tuning.py). The
// graph owns its decisions. Below autograd, an op finds them by the addresses of its index arrays.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "owners_by_arrays.h"

namespace edgeless {

// An op, and the rows and weights that it reads per edge.
struct OpShape {
  std::string op;  // "spmm", or "dot_D64" and "dot_backward_D64" for attention with heads of 64 features
  at::ScalarType dtype;
  int64_t width;  // values per row, over all heads
  bool weighted;

  bool operator==(const OpShape& other) const {
    return op == other.op && dtype == other.dtype && width == other.width && weighted == other.weighted;
  }
};

struct Decision {
  Engine engine;
  std::string origin;  // where the decision comes from, in words
};

class Decisions : public std::enable_shared_from_this<Decisions> {
 public:
  static std::shared_ptr<Decisions> make() { return std::shared_ptr<Decisions>(new Decisions()); }
  ~Decisions();

  // Keeps the first decision for a shape, so that results stay bitwise equal between calls.
  void decide(const at::Tensor& indptr, const at::Tensor& indices, OpShape shape, Decision decision);
  std::optional<Decision> of(at::TensorList csr, const OpShape& shape) const;
  int64_t num_entries() const;

 private:
  Decisions() = default;

  struct Entry {
    at::Tensor indptr, indices;  // kept alive, so that no other tensor can get their addresses
    OpShape shape;
    Decision decision;
  };

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

// Returns nullopt if nothing was decided for these arrays and this shape.
std::optional<Decision> decision_for(at::TensorList csr, const OpShape& shape);

// Returns `chosen` or, if that is Engine::automatic, the engine that was decided for these arrays. Costs one atomic
// load while no graph of the process has decisions. `head_dim` is appended to the names of ops whose decisions depend
// on it: "dot_D" and 64 give "dot_D64".
Engine decided_engine(Engine chosen, at::TensorList csr, const char* op, at::ScalarType dtype, int64_t width,
                      bool weighted, int64_t head_dim = 0);

// Adds Decisions and decision() to the module, for shared/choices/tuning.py.
void define_decisions(pybind11::module_& m);

}  // namespace edgeless
