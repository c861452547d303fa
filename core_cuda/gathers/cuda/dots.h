// A kernel that does little but gather rows, to tell what a graph's order is worth to ways of gathering. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../../common/storage.h"

namespace edgeless::cuda::gathers {

struct DotsArgs {
  CompressedGraph graph;
  const float* x = nullptr;  // [N, dim] without gaps
  int dim = 0;
  int passes = 1;        // over each row's neighbours: what is read again may come from a cache
  float* out = nullptr;  // [rows]
};

// by_neighbor: each lane of a warp has neighbours of its own and reads their rows from end to end; else all lanes read
// one neighbour's row together, and neighbours come one after the other. vectors: 16 bytes at a time, for which dim
// must be a multiple of 4 and x aligned.
cudaError_t run_dots(bool wide_index, bool by_neighbor, bool vectors, const DotsArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::gathers
