// Host entry points of the CUDA kernels of SpMM and SDDMM. No CUDA and no torch.
#pragma once

#include "../../jit/queue.h"
#include "args.h"

namespace edgeless::cuda::spmm {

// The whole SpMM, with the merge of hubs. words: 4-byte words of a vector, 1, 2 or 4.
template <class A>
void run_spmm(Storage storage, bool wide_index, int words, const SpmmArgs<A>& args, const jit::Queue& queue);

// Computes args.values for 32-bit indices. This is profitable where the SpMM reads the weights once per feature tile,
// or where weights are too many to be gathered by node and edge id from cache.
template <class A>
void fill_values(const SpmmArgs<A>& args, A* values, const jit::Queue& queue);

// SDDMM of rows in vectors of 16 bytes.
template <class A>
void run_sddmm(Storage storage, bool wide_index, const SddmmArgs<A>& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::spmm
