// Host entry points of the CUDA kernels of SpMM and SDDMM. Each returns the error of its launches.
#pragma once

#include "args.h"

namespace edgeless::cuda::spmm {

// The whole SpMM, with the merge of hubs. words: 4-byte words of a vector, 1, 2 or 4.
template <class A>
cudaError_t run_spmm(Storage storage, bool wide_index, int words, const SpmmArgs<A>& args, cudaStream_t stream);

// Computes args.values for 32-bit indices. This is profitable where the SpMM reads the weights once per feature tile,
// or where weights are too many to be gathered by node and edge id from cache.
template <class A>
cudaError_t fill_values(const SpmmArgs<A>& args, A* values, cudaStream_t stream);

// SDDMM of rows in vectors of 16 bytes.
template <class A>
cudaError_t run_sddmm(Storage storage, bool wide_index, const SddmmArgs<A>& args, cudaStream_t stream);

}  // namespace edgeless::cuda::spmm
