// Memory that the pool keeps must not be missing elsewhere. The system takes it back by itself, except where it counts
// addresses and not pages: under `ulimit -v`, and where it never promises more memory than it has.
#pragma once

#include <cstring>
#include <exception>
#include <new>

#include "pool.h"

namespace edgeless::cpu {

inline bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) || std::strstr(error.what(), "DefaultCPUAllocator");
}

// The kernel of an op: run again with an empty pool where it ran out of memory while the pool held some. The op must
// not have written to its inputs by then.
template <auto kernel>
struct WithRoom;

template <class Result, class... Args, Result (*kernel)(Args...)>
struct WithRoom<kernel> {
  static Result call(Args... args) {
    try {
      return kernel(args...);
    } catch (const std::exception& error) {
      if (!is_out_of_memory(error) || pooled_bytes() == 0) throw;
    }
    release_blocks();
    return kernel(args...);
  }
};

}  // namespace edgeless::cpu
