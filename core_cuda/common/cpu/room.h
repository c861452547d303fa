// Idle memory of the pool must not make other allocations fail. The system reclaims idle pages when memory is short,
// except where it limits address space instead of pages: under `ulimit -v` and without overcommit.
#pragma once

#include <cstring>
#include <exception>
#include <new>

#include "pool.h"

namespace edgeless::cpu {

inline bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) || std::strstr(error.what(), "DefaultCPUAllocator");
}

// Wraps the kernel of an op: if it runs out of memory while the pool holds idle blocks, the pool is emptied and the
// kernel runs again. The op must not have written to its inputs by then.
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
