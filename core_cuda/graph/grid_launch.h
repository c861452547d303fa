// The cooperative launch of kernels that sort in one launch (grid_sort.cuh). No CUDA and no torch.
#pragma once

#include "../jit/launch.h"
#include "grid_sort.h"

namespace edgeless::cuda {

// blocks: grid_blocks() of the items. `args` is the kernel's only parameter.
template <class Args>
void launch_grid(const jit::Expression& kernel, const Args& args, int blocks, const jit::Queue& queue) {
  jit::Shape shape{blocks, kGridThreads};
  shape.cooperative = true;
  jit::launch(queue, kernel, shape, args);
}

}  // namespace edgeless::cuda
