// Binary search, on the host and on the device. No torch.
#pragma once

#include <cstdint>

namespace edgeless {

// The first of [begin, end) that is at or behind something, `end` where none is. is_behind never turns false again.
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
