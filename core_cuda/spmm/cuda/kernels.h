// The entries of the CUDA kernels of SpMM and SDDMM. Each returns the error of its launches.
#pragma once

#include "args.h"

namespace edgeless::cuda::spmm {

// The product, hubs merged. words: 4-byte words of a vector, 1, 2 or 4.
template <class A>
cudaError_t run_spmm(Storage storage, bool wide_index, int words, const SpmmArgs<A>& args, cudaStream_t stream);

// args.values for 32-bit indices. Worth it where the product reads them in several slices, or where weights are many:
// in order, not by node and id.
template <class A>
cudaError_t fill_values(const SpmmArgs<A>& args, A* values, cudaStream_t stream);

// Vectors of 16 bytes.
template <class A>
cudaError_t run_sddmm(Storage storage, bool wide_index, const SddmmArgs<A>& args, cudaStream_t stream);

}  // namespace edgeless::cuda::spmm
