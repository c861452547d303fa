// Launches of the kernels that merge the segments of hubs (merge.cuh, segment_reduce.cuh). No CUDA and no torch.
#pragma once

#include "../jit/launch.h"
#include "kernel_types.h"
#include "partition.h"

namespace edgeless::cuda {

// Grid of the merge kernels: one block per kSlotsOfBlock slots and per kMergeThreads values of a segment.
inline jit::Size merge_grid(int64_t slots, int64_t numbers) {
  return {merge_blocks(slots), (numbers + kMergeThreads - 1) / kMergeThreads};
}

// Merges the segments that a segment reduction stored to the fix-up workspace. header: the file that defines `reducer`.
// args_type: the C++ type of args.
template <class Args>
void merge_reduced(const jit::Queue& queue, const char* header, const jit::Instance& reducer, bool wide_index,
                   jit::Type args_type, const Args& args) {
  if (!args.plan.hubs) return;
  const jit::Expression kernel(header, "merge_reduced_kernel", {reducer, index_type(wide_index), args_type});
  jit::launch(queue, kernel, {merge_grid(args.plan.slots, args.vectors), kMergeThreads}, args);
}

}  // namespace edgeless::cuda
