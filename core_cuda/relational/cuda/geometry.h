// Launch geometry shared by the kernels of this folder and their launches. `size`: bytes of a stored element. No CUDA
// and no torch.
#pragma once

#include <cstdint>

#include "shared_layout.h"

namespace edgeless::cuda::relational {

namespace any_product {
constexpr int kTile = 32, kDown = 8;  // a block of 32 by 8 threads computes 32 by 32 elements
constexpr int kAddThreads = 256;      // threads of a block that adds chunks
}  // namespace any_product

namespace product {
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int vector(int size) { return 16 / size; }
// Depth of the four vectors that the four threads of a row hold; it is the depth of two mma.
constexpr int group_depth(int size) { return 4 * vector(size); }
constexpr int kGroups = 2;  // groups of a step
// chunk: depth of the weights that are staged in shared memory at a time. vectors: 16-byte vectors that a lane stages
// for a group of depths and eight columns; floats take two because each is split into two values.
constexpr int chunk(int size) { return size == 4 ? 128 : 256; }
constexpr int vectors(int size) { return size == 4 ? 2 : 1; }
// Number of 8-column mma across the columns of a block. With narrow_sides a thread stores one vector per row of
// results.
constexpr int kWideSides = 8;
constexpr int narrow_sides(int size) { return vector(size) / 2; }
constexpr int sides(int size, int columns) {
  return columns <= 8 * narrow_sides(size) ? narrow_sides(size) : kWideSides;
}
// Slots of a warp's ring of prefetched rows, bytes of a slot and bytes of the ring.
constexpr int kSlots = 4, kSlotBytes = 2 * kGroups * 32 * 16, kRowBytes = kSlots * kSlotBytes;

constexpr int shared_bytes(int size, int depth, int sides) {
  const int staged = depth < chunk(size) ? depth : chunk(size);
  const int groups = (staged + group_depth(size) - 1) / group_depth(size);
  return kWarps * kRowBytes + groups * vectors(size) * sides * 32 * 16;
}
}  // namespace product

namespace outer {
constexpr int kSize = 64, kThreads = 128;             // a block computes 64 by 64 elements of a matrix
constexpr int stages(int size) { return 16 / size; }  // pipeline stages, each with a tile of both operands
constexpr int kTileNumbers = 32 * (kSize + 8);        // of 32 entries
constexpr int kSharedBytes = 16 * 2 * kTileNumbers;   // of all stages, for either element size
}  // namespace outer

namespace add_gradients {
constexpr int kThreads = 256;
constexpr int kOwnSides = 32;  // threads that divide the chunks of the sums over all rows
}  // namespace add_gradients

namespace own_gradients {
constexpr int kSquareThreads = 128;  // per block of own_squares_kernel
}

namespace pair_weights {
constexpr int kThreads = 512;
}

namespace typed_rows {
constexpr int kThreads = 256;
constexpr int kLanes = 32, kSides = 8;  // a block that adds chunks has kLanes columns and kSides threads per column
}  // namespace typed_rows

// Kernels whose warps sum sixteen segments or rows in registers.
constexpr int kWarpSegments = 16;
constexpr int kPartThreads = 256;  // per block of a kernel that splits weights

struct ShortProducts {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;  // per block
  static constexpr int kBlocks = 4;                         // target occupancy in blocks per SM
  static constexpr int kStep = kWarps * kWarpSegments;      // segments that a block sums at a time
};

struct ShortGradients {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 3;
  static constexpr int kStep = kWarps * kWarpSegments;
};

struct ShortRows {
  static constexpr int kThreads = kPartThreads, kWarps = kThreads / 32;
  static constexpr int kBlocks = 2;
  static constexpr int kFew = 16;  // the most neighbours of a row that a group of four lanes sums
};

}  // namespace edgeless::cuda::relational
