// Tiles of segments and rows (../tiling.h) on the GPU. No CUDA and no torch, no host sync.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../jit/queue.h"
#include "../tiling.h"

namespace edgeless::cuda::relational {

constexpr int kTypeThreads = 512;  // of the block that counts the tiles of the types

// Tiles of segments. totals: null, or [2] parts of hubs, and their segments.
template <class I>
void tile_segments(const Tiling<I>& args, int64_t* totals, const jit::Queue& queue);

// What rows add up, where there are hubs. `scratch` holds hubs_scratch<I>(num_rows) bytes.
template <class I>
size_t hubs_scratch(int64_t num_rows);
template <class I>
void split_hubs(const Tiling<I>& args, void* scratch, const jit::Queue& queue);

// Tiles of rows, `count` with what is behind the last. ptr [num_rows + 1]: first place of a row.
template <class I>
void tile_rows(const I* ptr, int64_t num_rows, int64_t count, I* row_tiles, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
