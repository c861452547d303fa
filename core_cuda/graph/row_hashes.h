// Row hashes of integer tables, for shared/graph/fingerprint.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace edgeless {

// The sum, modulo 2^64, of one hash per row. Columns are [n], int64, contiguous and on the CPU. `first`: the position
// of the first row; if given, hashes include the position, and the order of rows matters.
int64_t sum_of_row_hashes(const std::vector<at::Tensor>& columns, std::optional<int64_t> first);

}  // namespace edgeless
