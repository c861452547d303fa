// The arguments of the op gather_packed: their checks, and the results and columns that follow from them.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "../common/optional.h"
#include "columns.h"

namespace edgeless {

// The arguments of the op, see core_cuda/library.cpp.
struct PackedInputs {
  at::TensorList columns;
  at::IntArrayRef dims, levels, increments;
  const c10::List<Optional<at::Tensor>>& last;
  const at::Tensor &starts, &begins;
  at::IntArrayRef sizes;
};

// Returns the results, not yet written, and the columns that write them.
std::pair<std::vector<at::Tensor>, std::vector<PackedColumn>> packed_columns(const PackedInputs& inputs);

}  // namespace edgeless
