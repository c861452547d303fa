// Binary search for host and device. No torch.
#pragma once

#include <cstdint>

namespace edgeless {

// Returns the first integer in [begin, end) for which is_behind holds, or `end`. is_behind must be monotonic.
template <class F>
constexpr int64_t first_behind(int64_t begin, int64_t end, const F& is_behind) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (is_behind(middle)) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

}  // namespace edgeless
