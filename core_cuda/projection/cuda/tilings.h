// The tiles that thread blocks of matrix products compute, for kernels and their launches. No CUDA and no torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda::projection {

constexpr int kTileDepth = 32;

// A block computes a kRows x kColumns tile of C; a warp kDown x kSide mma tiles of 16 x 8. Shared memory holds kStages
// stages. kBlocks: target occupancy in blocks per SM.
template <int kRows_, int kColumns_, int kDown_, int kSide_, int kStages_, int kBlocks_>
struct Tiling {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kDown = kDown_, kSide = kSide_;
  static constexpr int kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kAcross = kColumns / (8 * kSide);  // warps across the columns
  static constexpr int kThreads = 32 * kAcross * kRows / (16 * kDown);
  using Sum = float[kDown][kSide][4];  // a lane's accumulators

  static constexpr int64_t blocks(int64_t rows, int64_t columns) {
    return (rows + kRows - 1) / kRows * ((columns + kColumns - 1) / kColumns);
  }
};

// HalfTiling is for 16-bit elements. float32 products need more registers: SquareTiling and, for many deep tiles,
// WideTiling, whose warps read each element from shared memory less often.
using HalfTiling = Tiling<128, 64, 2, 4, 3, 2>;
using SquareTiling = Tiling<64, 64, 2, 4, 3, 4>;
using WideTiling = Tiling<128, 64, 4, 4, 2, 3>;

// Elements of a tile of one operand in shared memory, and the padding of a row of float32 tiles; see Tiles in
// tiles.cuh.
constexpr int tile_numbers(int size, bool transposed, int pad) {
  return transposed ? kTileDepth * (size + pad) : size * (kTileDepth + pad);
}
constexpr int float_pad(bool transposed) { return transposed ? 8 : 4; }

// Elements of a stage of both operands in float32.
template <class Tiling>
constexpr int float_stage(bool transposed_a, bool transposed_b) {
  return tile_numbers(Tiling::kRows, transposed_a, float_pad(transposed_a)) +
         tile_numbers(Tiling::kColumns, transposed_b, float_pad(transposed_b));
}

}  // namespace edgeless::cuda::projection
