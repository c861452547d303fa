// Tiles of segments and rows (../tiling.h) on the GPU. No CUDA and no torch, no host sync.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../jit/queue.h"
#include "../tiling.h"

namespace edgeless::cuda::relational {

constexpr int kTypeThreads = 512;  // threads of the block that counts the tiles of all types

// Tiles of segments. totals: null, or [2] number of the hubs' parts, and of their segments.
template <class I>
void tile_segments(const Tiling<I>& args, int64_t* totals, const jit::Queue& queue);

// Lists what every row sums, if there are hubs. `scratch` holds hubs_scratch<I>(num_rows) bytes.
template <class I>
size_t hubs_scratch(int64_t num_rows);
template <class I>
void split_hubs(const Tiling<I>& args, void* scratch, const jit::Queue& queue);

// Tiles of rows. count: size of row_tiles, with the end behind the last tile. ptr [num_rows + 1]: row pointers.
template <class I>
void tile_rows(const I* ptr, int64_t num_rows, int64_t count, I* row_tiles, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
