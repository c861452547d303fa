// Launch geometry of the kernels of this folder: what both they and their launches know. `size`: bytes of a stored
// number. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "shared_layout.h"

namespace edgeless::cuda::relational {

namespace any_product {
constexpr int kTile = 32, kDown = 8;  // a block of 32 by 8 threads makes 32 by 32 numbers
constexpr int kAddThreads = 256;      // of a block that adds chunks
}  // namespace any_product

namespace product {
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int vector(int size) { return 16 / size; }
// The depth of the vectors that the four threads of a row have, which is the depth of two mma.
constexpr int group_depth(int size) { return 4 * vector(size); }
constexpr int kGroups = 2;  // of a step
// The depth of the weights that are in shared memory, and how many vectors they take there for a group of depths and
// eight columns: a float is two numbers.
constexpr int chunk(int size) { return size == 4 ? 128 : 256; }
constexpr int vectors(int size) { return size == 4 ? 2 : 1; }
// The number of mma of 8 columns each that a block makes. With the fewer of the two, a thread has one vector of a row
// of results.
constexpr int kWideSides = 8;
constexpr int narrow_sides(int size) { return vector(size) / 2; }
constexpr int sides(int size, int columns) {
  return columns <= 8 * narrow_sides(size) ? narrow_sides(size) : kWideSides;
}
// Steps of rows that a warp has in flight, and their bytes.
constexpr int kSlots = 4, kSlotBytes = 2 * kGroups * 32 * 16, kRowBytes = kSlots * kSlotBytes;

constexpr int shared_bytes(int size, int depth, int sides) {
  const int staged = depth < chunk(size) ? depth : chunk(size);
  const int groups = (staged + group_depth(size) - 1) / group_depth(size);
  return kWarps * kRowBytes + groups * vectors(size) * sides * 32 * 16;
}
}  // namespace product

namespace outer {
constexpr int kSize = 64, kThreads = 128;             // a block makes 64 by 64 numbers of a matrix
constexpr int stages(int size) { return 16 / size; }  // tiles of both operands in shared memory
constexpr int kTileNumbers = 32 * (kSize + 8);        // of 32 entries each
constexpr int kSharedBytes = 16 * 2 * kTileNumbers;   // of all stages, whatever the size of a number
}  // namespace outer

namespace add_gradients {
constexpr int kThreads = 256;
constexpr int kOwnSides = 32;  // that share the chunks of what is summed over all rows
}  // namespace add_gradients

namespace own_gradients {
constexpr int kSquareThreads = 128;  // of a block of own_squares_kernel
}

namespace pair_weights {
constexpr int kThreads = 512;
}

namespace typed_rows {
constexpr int kThreads = 256;
constexpr int kLanes = 32, kSides = 8;  // a block that adds chunks has so many columns, and threads for each
}  // namespace typed_rows

// Kernels whose warps sum sixteen segments, or rows, in registers.
constexpr int kWarpSegments = 16;
constexpr int kPartThreads = 256;  // of a block that splits weights

struct ShortProducts {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;  // of a block
  static constexpr int kBlocks = 4;                         // that a multiprocessor has registers for
  static constexpr int kStep = kWarps * kWarpSegments;      // segments that a block has at once
};

struct ShortGradients {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 3;
  static constexpr int kStep = kWarps * kWarpSegments;
};

struct ShortRows {
  static constexpr int kThreads = kPartThreads, kWarps = kThreads / 32;
  static constexpr int kBlocks = 2;
  static constexpr int kFew = 16;  // neighbours that four lanes sum
};

}  // namespace edgeless::cuda::relational
