// What shared/fingerprint.py adds up for tables of integers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace edgeless {

// The sum, modulo 2^64, of one hash for every row of columns [n], which are int64, contiguous and on the CPU. `first`:
// the position of the first row, where positions count.
int64_t sum_of_row_hashes(const std::vector<at::Tensor>& columns, std::optional<int64_t> first);

}  // namespace edgeless
