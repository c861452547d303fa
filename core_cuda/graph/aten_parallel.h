// Runs blocks of work (edge_sort.h) on torch's threads.
#pragma once

#include <ATen/Parallel.h>

namespace edgeless {

struct AtenParallel {
  int64_t threads() const { return at::get_num_threads(); }

  template <typename F>
  void operator()(int64_t count, const F& f) const {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        f(i);
      }
    });
  }
};

}  // namespace edgeless
