// The entries of the CUDA kernels of neighbor_reduce. Each returns the error of its launches.
#pragma once

#include "args.h"

namespace edgeless::cuda::reduction {

// The forward, hubs merged. shares: edges with the extremum are counted (args.h).
cudaError_t run_reduce(Storage storage, bool wide_index, bool shares, const ReduceArgs& args, cudaStream_t stream);
int64_t piece_bytes(Storage storage, bool wide_index, bool shares);  // of a lane, in the carry

// The backward, gathered; 32-bit indices, no doubles. First the positions that it needs, over the rows of the forward.
cudaError_t edge_positions(const CompressedGraph& graph, const Partition& part, int32_t* positions,
                           cudaStream_t stream);
cudaError_t gather_grad(Storage storage, bool shares, const GatherArgs& args, cudaStream_t stream);

// The same of float numbers, ties "first", with arguments as bytes. First these, of arguments of 2 or 4 bytes, as many
// as fill words of 4.
cudaError_t argument_bytes(const void* arg, int arg_size, int64_t count, uint8_t* bytes, cudaStream_t stream);
cudaError_t masked_gather_grad(const GatherArgs& args, cudaStream_t stream);

// The backward, sorted and gathered, of one slice of the columns; 32-bit indices, 16-bit storage, ties "first".
cudaError_t sorted_grad(Storage storage, const SortArgs& args, cudaStream_t stream);

// The backward, sent: first measure() once, then slice() for one slice of the features after the other (sums are zero
// before the first, and after each but the last), then rest().
cudaError_t measure(Storage storage, const ScatterArgs& args, cudaStream_t stream);
cudaError_t slice(Storage storage, bool wide_index, const ScatterArgs& args, cudaStream_t stream);
cudaError_t rest(Storage storage, bool wide_index, const ScatterArgs& args, cudaStream_t stream);
// Or, in place of slice() and rest(), all at once with the sums in shared memory; no doubles.
cudaError_t shared_scatter_grad(Storage storage, bool wide_index, const SharedScatterArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::reduction
