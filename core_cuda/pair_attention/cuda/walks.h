// Builds the index arrays of attention over pairs (../walks.h) on the GPU. No torch, no host sync.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../walks.h"

namespace edgeless::cuda {

template <class I>
size_t walks_scratch(int64_t pieces);
// args.longest must be zeroed. `scratch` has walks_scratch<I>(pieces) bytes.
template <class I>
cudaError_t make_walks(const WalksArgs<I>& args, void* scratch, cudaStream_t stream);

}  // namespace edgeless::cuda
