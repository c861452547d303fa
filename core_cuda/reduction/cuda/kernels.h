// Host entry points of the CUDA kernels of neighbor_reduce. Each returns the error of its launches.
#pragma once

#include "args.h"

namespace edgeless::cuda::reduction {

// The whole forward, with the merge of hubs. shares: ties are counted (args.h).
cudaError_t run_reduce(Storage storage, bool wide_index, bool shares, const ReduceArgs& args, cudaStream_t stream);
int64_t piece_bytes(Storage storage, bool wide_index, bool shares);  // bytes per lane in the fix-up workspace

// The gathered backward, for 32-bit indices and no doubles. edge_positions, over the CSR, computes its positions.
cudaError_t edge_positions(const CompressedGraph& graph, const Partition& part, int32_t* positions,
                           cudaStream_t stream);
cudaError_t gather_grad(Storage storage, bool shares, const GatherArgs& args, cudaStream_t stream);

// The gathered backward of float with ties "first", which reads arguments as bytes. argument_bytes converts arguments
// of 2 or 4 bytes; count must be a multiple of 4.
cudaError_t argument_bytes(const void* arg, int arg_size, int64_t count, uint8_t* bytes, cudaStream_t stream);
cudaError_t masked_gather_grad(const GatherArgs& args, cudaStream_t stream);

// The sorted backward of one feature tile, for 32-bit indices, 16-bit storage and ties "first".
cudaError_t sorted_grad(Storage storage, const SortArgs& args, cudaStream_t stream);

// The scattered backward: measure() once, then slice() for each feature tile in turn, then rest(), which adds gradients
// that are not finite. The caller zeroes the sums before the first tile; slice() zeroes them after each but the last.
cudaError_t measure(Storage storage, const ScatterArgs& args, cudaStream_t stream);
cudaError_t slice(Storage storage, bool wide_index, const ScatterArgs& args, cudaStream_t stream);
cudaError_t rest(Storage storage, bool wide_index, const ScatterArgs& args, cudaStream_t stream);
// Replaces slice() and rest() with one launch that has the sums in shared memory; no doubles.
cudaError_t shared_scatter_grad(Storage storage, bool wide_index, const SharedScatterArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::reduction
