// Engines that were measured to be the fastest for an op on a direction of a graph (shared/tuning.py). Owned by the
// graph and found again, below autograd, by the arrays that an op is given.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/owners_by_arrays.h"
#include "engine.h"

namespace edgeless {

// What an op reads for an edge.
struct OpShape {
  std::string op;  // "spmm"; "dot_D64", "dot_backward_D64": attention by heads of so many features
  at::ScalarType dtype;
  int64_t width;  // numbers of a row, all heads
  bool weighted;

  bool operator==(const OpShape& other) const {
    return op == other.op && dtype == other.dtype && width == other.width && weighted == other.weighted;
  }
};

struct Decision {
  Engine engine;
  std::string origin;  // in words: where it is from
};

class Decisions : public std::enable_shared_from_this<Decisions> {
 public:
  static std::shared_ptr<Decisions> make() { return std::shared_ptr<Decisions>(new Decisions()); }
  ~Decisions();

  // The first decision for a shape stands, so that bits do not change between calls.
  void decide(const at::Tensor& indptr, const at::Tensor& indices, OpShape shape, Decision decision);
  std::optional<Decision> of(at::TensorList csr, const OpShape& shape) const;
  int64_t num_entries() const;

 private:
  Decisions() = default;

  struct Entry {
    at::Tensor indptr, indices;  // held, so that no other tensor can take their addresses
    OpShape shape;
    Decision decision;
  };

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

// None where nothing was decided.
std::optional<Decision> decision_for(at::TensorList csr, const OpShape& shape);

// `chosen` or, where that is automatic, what was decided for these arrays. Costs next to nothing while no graph of the
// process has decisions. `head_dim` stands behind the names of ops that are decided by it: "dot_D" and 64.
Engine decided_engine(Engine chosen, at::TensorList csr, const char* op, at::ScalarType dtype, int64_t width,
                      bool weighted, int64_t head_dim = 0);

// Adds what shared/tuning.py tells and asks.
void define_decisions(pybind11::module_& m);

}  // namespace edgeless
