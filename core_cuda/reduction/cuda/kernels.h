// Host entry points of the CUDA kernels of neighbor_reduce. No CUDA and no torch.
#pragma once

#include "../../jit/queue.h"
#include "args.h"

namespace edgeless::cuda::reduction {

// The whole forward, with the merge of hubs. shares: ties are counted (args.h).
void run_reduce(Storage storage, bool wide_index, bool shares, const ReduceArgs& args, const jit::Queue& queue);

// The gathered backward, for 32-bit indices and no doubles. edge_positions, over the CSR, computes its positions.
void edge_positions(const CompressedGraph& graph, const Partition& part, int32_t* positions, const jit::Queue& queue);
void gather_grad(Storage storage, bool shares, const GatherArgs& args, const jit::Queue& queue);

// The scattered backward: measure() once, then slice() for each feature tile in turn, then rest(), which adds gradients
// that are not finite. The caller zeroes the sums before the first tile; slice() zeroes them after each but the last.
void measure(Storage storage, const ScatterArgs& args, const jit::Queue& queue);
void slice(Storage storage, bool wide_index, const ScatterArgs& args, const jit::Queue& queue);
void rest(Storage storage, bool wide_index, const ScatterArgs& args, const jit::Queue& queue);
// Replaces slice() and rest() with one launch that has the sums in shared memory; no doubles.
void shared_scatter_grad(Storage storage, bool wide_index, const SharedScatterArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::reduction
