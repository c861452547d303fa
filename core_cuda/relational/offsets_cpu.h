// The types' offsets on the host, and the division of entries into runs.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "../common/checks.h"
#include "cpu/args.h"

namespace edgeless::cpu {

// Returns all runs of at most `size` entries. offsets: [types + 1].
inline std::vector<TypedRun> runs_of(const std::vector<int64_t>& offsets, int64_t size) {
  std::vector<TypedRun> runs;
  for (size_t type = 0; type + 1 < offsets.size(); ++type) {
    for (int64_t begin = offsets[type]; begin < offsets[type + 1]; begin += size) {
      runs.push_back({static_cast<int64_t>(type), begin, std::min(begin + size, offsets[type + 1])});
    }
  }
  return runs;
}

inline std::vector<int64_t> host_offsets(const at::Tensor& offsets) {
  const at::Tensor wide = offsets.to(at::kLong).contiguous();
  return {wide.const_data_ptr<int64_t>(), wide.const_data_ptr<int64_t>() + wide.numel()};
}

inline std::vector<int64_t> checked_offsets(const char* op, const at::Tensor& offsets, int64_t entries) {
  std::vector<int64_t> found = host_offsets(offsets);
  TORCH_CHECK_VALUE(found.front() == 0 && found.back() == entries, op, ": offsets must run from 0 to N = ", entries,
                    ", got ", found.front(), " to ", found.back());
  for (size_t t = 0; t + 1 < found.size(); ++t) {
    TORCH_CHECK_VALUE(found[t] <= found[t + 1], op, ": offsets must not fall, got ", found[t], " then ", found[t + 1]);
  }
  return found;
}

}  // namespace edgeless::cpu
