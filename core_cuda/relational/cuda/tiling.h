// Tiles of pieces and rows (../tiling.h) on the GPU. No torch, no host sync.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../tiling.h"

namespace edgeless::cuda::relational {

// Tiles of pieces. totals: null, or [2] parts of hubs, and their pieces.
template <class I>
cudaError_t tile_pieces(const Tiling<I>& args, int64_t* totals, cudaStream_t stream);

// What rows add up, where there are hubs. `scratch` holds hubs_scratch<I>(num_rows) bytes.
template <class I>
size_t hubs_scratch(int64_t num_rows);
template <class I>
cudaError_t split_hubs(const Tiling<I>& args, void* scratch, cudaStream_t stream);

// Tiles of rows, `count` with what is behind the last. ptr [num_rows + 1]: first place of a row.
template <class I>
cudaError_t tile_rows(const I* ptr, int64_t num_rows, int64_t count, I* row_tiles, cudaStream_t stream);

}  // namespace edgeless::cuda::relational
