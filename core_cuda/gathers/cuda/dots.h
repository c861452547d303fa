// A kernel that does little but gather rows, to measure what a graph's node order is worth to each access pattern. No
// CUDA and no torch.
#pragma once

#include "../../common/storage.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::gathers {

struct DotsArgs {
  CompressedGraph graph;
  const float* x = nullptr;  // [N, dim], contiguous
  int dim = 0;
  int passes = 1;        // times that each row's neighbours are read; later passes may hit a cache
  float* out = nullptr;  // [rows]
};

// by_neighbor: each lane of a warp reads whole rows of its own neighbours; otherwise all lanes read one neighbour's row
// together, one neighbour after the other. vectors: 16-byte loads, for which dim must be a multiple of 4 and x aligned.
void run_dots(bool wide_index, bool by_neighbor, bool vectors, const DotsArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::gathers
